#include "front/model.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/lazy.h"
#include "front/model_layers.h"

namespace lawson::front {
namespace {

Status check_options(const ModelOptions& options, const std::string& source) {
  const auto in_range = [](std::int64_t value) { return value >= 1 && value <= kMaxSize; };
  for (const auto& [name, value] :
       {std::pair{"batch", options.batch}, std::pair{"seqlen", options.seqlen},
        std::pair{"context", options.context}}) {
    if (!in_range(value)) {
      return invalid("{}: option {}: {} is not allowed; expected 1 to {}", source, name, value,
                     kMaxSize);
    }
  }
  if (options.batch > kMaxSize / options.seqlen) {
    return invalid("{}: option batch: {} is not allowed; expected at most {} for a seqlen of {}",
                   source, options.batch, kMaxSize / options.seqlen, options.seqlen);
  }
  for (const std::string& pass : options.passes) {
    if (pass != "prefill" && pass != "decode" && pass != "training") {
      return invalid("{}: option pass: '{}' is not allowed; expected prefill, decode or training",
                     source, pass);
    }
  }
  if (!options.dtype.empty() && options.dtype != "f16" && options.dtype != "bf16" &&
      options.dtype != "f32") {
    return invalid("{}: option dtype: '{}' is not allowed; expected f16, bf16 or f32", source,
                   options.dtype);
  }
  return {};
}

std::string read_dtype(ModelConfig& config, const std::string& inherited) {
  const std::string name = config.word_or({"torch_dtype", "dtype"}, "");
  if (name == "float16" || name == "torch.float16") return "f16";
  if (name == "bfloat16" || name == "torch.bfloat16") return "bf16";
  return inherited;
}

// ".../llama-3.1-8b.json" and ".../llama-3.1-8b/config.json" are both "llama-3.1-8b".
std::string model_name(const std::string& source) {
  const std::filesystem::path path(source);
  const std::string stem = path.stem().string();
  const std::string folder = path.parent_path().filename().string();
  return stem == "config" && !folder.empty() && folder != "." ? folder : stem;
}

// The text model of a wrapper's name, for configs that do not say it themselves.
std::string text_type(const std::string& wrapper) {
  return wrapper == "gemma3" ? "gemma3_text" : wrapper;
}

class Derivation {
 public:
  Derivation(const Json& config, const std::string& source, const ModelOptions& options)
      : config_{config, source, ""},
        options_{options},
        extent_{options.batch, options.seqlen, options.context} {
    model_.name = model_name(source);
  }

  Result<Model> run() {
    model_.model_type = config_.word_or({"model_type"}, "");
    const std::string dtype = read_dtype(config_, "bf16");
    if (config_.has({"text_config"})) {
      wrapper(dtype);
    } else {
      part(config_, text_type(model_.model_type), dtype, "", true);
    }
    if (!config_.ok()) return config_.error();
    model_.warnings = config_.warnings();
    return std::move(model_);
  }

 private:
  void wrapper(const std::string& dtype) {
    ModelConfig text = config_.nested("text_config");
    part(text, text.word_or({"model_type"}, text_type(model_.model_type)), dtype, "", true);
    config_.absorb(text);
    if (!config_.has({"vision_config"})) return;
    ModelConfig vision = config_.nested("vision_config");
    const std::string type = vision.word_or({"model_type"}, "");
    if (is_encoder_type(type)) {
      part(vision, type, dtype, "vision.", false);
    } else {
      vision.warn(
          fmt::format("the vision tower (model_type '{}') is left out: it is not known", type));
    }
    config_.absorb(vision);
  }

  // `leading` parts give the model its family and its layer count.
  void part(ModelConfig& config, const std::string& type, const std::string& inherited_dtype,
            const std::string& prefix, bool leading) {
    if (!is_decoder_type(type) && !is_encoder_type(type)) {
      config.warn(fmt::format(
          "model_type '{}' is not known: derived from the fields that most decoders share"
          " (known: {})",
          type, fmt::join(known_model_types(), ", ")));
    }
    const std::string dtype =
        options_.dtype.empty() ? read_dtype(config, inherited_dtype) : options_.dtype;
    const Architecture architecture = is_encoder_type(type) ? derive_encoder(config, type, extent_)
                                                            : derive_decoder(config, type, extent_);
    if (!config.ok()) return;
    if (leading) {
      model_.family = architecture.family;
      model_.layers = architecture.layers;
    }
    append_workloads(architecture, options_, dtype, prefix, model_);
  }

  ModelConfig config_;
  const ModelOptions& options_;
  Extent extent_;
  Model model_;
};

}  // namespace

std::vector<std::string> known_model_types() {
  std::vector<std::string> types = decoder_types();
  for (std::string& type : encoder_types()) types.push_back(std::move(type));
  types.emplace_back("gemma3");
  std::sort(types.begin(), types.end());
  return types;
}

std::string activation_op(ModelConfig& config, const std::string& field, const std::string& name) {
  static Lazy<const std::map<std::string, std::string>> table;
  const auto& ops = table.get([] {
    return std::map<std::string, std::string>{
        {"gelu", "gelu"},
        {"gelu_fast", "gelu_tanh"},
        {"gelu_new", "gelu_tanh"},
        {"gelu_python", "gelu"},
        {"gelu_pytorch_tanh", "gelu_tanh"},
        {"quick_gelu", "quick_gelu"},
        {"relu", "relu"},
        {"sigmoid", "sigmoid"},
        {"silu", "silu"},
        {"swish", "silu"},
        {"tanh", "tanh"},
    };
  });
  const auto it = ops.find(name);
  if (it != ops.end()) return it->second;
  std::vector<std::string> known;
  for (const auto& [key, op] : ops) known.push_back(key);
  config.fail({field}, Json(name), fmt::format("one of {}", fmt::join(known, ", ")));
  return "";
}

Extent limited(ModelConfig& config, const Extent& extent, std::int64_t limit,
               const std::string& field) {
  Extent result = extent;
  result.seqlen = std::min(extent.seqlen, limit);
  result.context = std::min(extent.context, limit);
  if (result.seqlen < extent.seqlen || result.context < extent.context) {
    config.warn(fmt::format("lengths are cut to the model's {} positions ({})", limit, field));
  }
  return result;
}

GemmLayers token_gemm(std::string name, std::int64_t layers, const Extent& extent, std::int64_t k,
                      std::int64_t n, bool bias) {
  GemmLayers gemm;
  gemm.name = std::move(name);
  gemm.layers = layers;
  gemm.rows_prefill = gemm.rows_training = extent.batch * extent.seqlen;
  gemm.rows_decode = extent.batch;
  gemm.k = k;
  gemm.n = n;
  gemm.bias = bias;
  return gemm;
}

Result<Model> model_from_json(const Json& config, const std::string& source,
                              const ModelOptions& options) {
  LAWSON_CHECK(check_options(options, source));
  if (!config.is_object()) {
    return invalid("{}: expected a model's config (an object), got {}", source, config.type_name());
  }
  return Derivation{config, source, options}.run();
}

}  // namespace lawson::front

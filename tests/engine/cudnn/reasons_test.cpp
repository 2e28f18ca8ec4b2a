#include "engine/cudnn/reasons.h"

#include <gtest/gtest.h>

#include "front/attention.h"
#include "ir/json.h"

namespace lawson::cudnn {
namespace {

// Messages of cuDNN 9.19 and cudnn-frontend 1.32, as they come.
const std::string kArchMismatch =
    "No valid engine configs for ___\n"
    R"({"engineId":0,"smVersion":750,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":-1}})"
    "\nWarning: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN; Reason: Live entrance node to be "
    "processed "
    "not found in live_entrance_nodes set at: live_entrance_nodes.count(removed_node) == 0\n"
    "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: (CUDNN_STATUS_NOT_INITIALIZED == status) || "
    "(CUDNN_STATUS_NOT_SUPPORTED == ((status) / 1000 * 1000))\n\n"
    R"({"engineId":9,"smVersion":750,"knobChoices":{"CUDNN_KNOB_TYPE_SPLIT_K_SLC":-1,)"
    R"("CUDNN_KNOB_TYPE_KERNEL_CFG":-1}})"
    "\nWarning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: FORT_NATIVE_10X engine is only "
    "supported since Blackwell architecture at: !(1000 <= this->getDeviceProp()->deviceVer && "
    "this->getDeviceProp()->deviceVer < 1200)\n\n"
    R"({"engineId":7,"smVersion":750,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":7}})"
    "\nWarning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: FORT_NATIVE_8X engine is only "
    "supported since Ampere architecture at: !(800 <= this->getDeviceProp()->deviceVer)\n";

const std::string kCublas =
    "No valid engine configs for _\n"
    R"({"engineId":0,"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":-1}})"
    "\nWarning: CUDNN_STATUS_NOT_SUPPORTED; Reason: "
    "runtime_cublasLtHelper.create_cublas_handle(false)\n\n"
    R"({"engineId":7,"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":-1}})"
    "\nWarning: CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE; Reason: !is_input_compute_type_match\n";

const std::string kNoNvrtc =
    "No valid engine configs for ___\n"
    R"({"engineId":7,"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":-1}})"
    "\nWarning: CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING; Reason: Could not open "
    "libnvrtc at: this->libnvrtc == nullptr\n";

const std::string kNoCompile =
    "CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: cudnnFinalize Descriptor FailedEncountered runtime "
    "kernel compilation failure at: compilationResult != NVRTC_SUCCESS cudnn_status: "
    "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED";

Device device(const std::string& name, int compute_capability) {
  Device result;
  result.kind = Device::Kind::cuda;
  result.name = name;
  result.title = name;
  result.compute_capability = compute_capability;
  return result;
}

ir::Graph matmul() {
  const Json spec = Json::parse(R"({"lawson": 1, "kind": "graph", "name": "mm",
    "inputs": [{"name": "x", "dtype": "bf16", "shape": [2, 16, 16]},
               {"name": "y", "dtype": "bf16", "shape": [2, 16, 16]}],
    "ops": [{"op": "matmul", "in": ["x", "y"], "out": "z"}], "outputs": ["z"]})");
  auto graph = ir::graph_from_json(spec, "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

ir::Graph attention(Json changes) {
  Json spec{{"lawson", 1}, {"kind", "attention"}, {"dtype", "bf16"},   {"batch", 1},
            {"heads", 4},  {"seqlen_q", 128},     {"head_dim_qk", 64}, {"name", "case"}};
  if (!changes.is_null()) spec.update(changes);
  auto read = front::attention_from_json(spec, "test");
  EXPECT_TRUE(read.ok()) << (read.ok() ? "" : read.error().message);
  return *front::attention_graph(*read, read->pass);
}

TEST(Reasons, Categories) {
  struct Row {
    const char* stage;
    const char* code;
    std::string text;
    bool deviceless;
    Fault fault;
  };
  const std::vector<Row> rows{
      {"validate", "GRAPH_NOT_SUPPORTED", "hidden_dim should be multiple of 8", true,
       Fault::unsupported},
      {"validate", "GRAPH_NOT_SUPPORTED", "", true, Fault::unsupported},
      {"validate", "ATTRIBUTE_NOT_SET", "The dim for Q is invalid", true, Fault::caller},
      {"validate", "ATTRIBUTE_NOT_SET", "SDPA with sink_token is not supported before 9.13.", true,
       Fault::unsupported},
      {"validate", "SHAPE_DEDUCTION_FAILED", "dims", true, Fault::caller},
      {"validate", "INVALID_VALUE", "Right bound needs to be larger", true, Fault::caller},
      {"execute", "INVALID_VARIANT_PACK", "Uid 4 does not exist", false, Fault::caller},
      {"heuristics", "HEURISTIC_QUERY_FAILED", kArchMismatch, true, Fault::unsupported},
      {"heuristics", "HEURISTIC_QUERY_FAILED", "", true, Fault::unsupported},
      {"heuristics", "HEURISTIC_QUERY_FAILED", kCublas, true, Fault::undecided},
      {"heuristics", "HEURISTIC_QUERY_FAILED", kCublas, false, Fault::unsupported},
      {"heuristics", "HEURISTIC_QUERY_FAILED", kNoNvrtc, true, Fault::environment},
      // One engine misses a library, another refuses: the first may have taken the graph.
      {"heuristics", "HEURISTIC_QUERY_FAILED", kArchMismatch + kNoNvrtc, true, Fault::environment},
      {"heuristics", "HEURISTIC_QUERY_FAILED", kCublas + kNoNvrtc, true, Fault::environment},
      {"check_support", "GRAPH_EXECUTION_PLAN_CREATION_FAILED", "No execution plans", true,
       Fault::unsupported},
      {"build_plan", "GRAPH_EXECUTION_PLAN_CREATION_FAILED", kNoCompile, true,
       Fault::compile_failed},
      {"execute", "GRAPH_EXECUTION_FAILED", kNoCompile, false, Fault::broken},
      {"build_plan", "GRAPH_EXECUTION_PLAN_CREATION_FAILED",
       "finalize failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT", true,
       Fault::unsupported},
      {"build_operation_graph", "CUDNN_BACKEND_API_FAILED",
       "cudnnFinalize failed cudnn_status: CUDNN_STATUS_BAD_PARAM", true, Fault::caller},
      {"build_operation_graph", "CUDNN_BACKEND_API_FAILED",
       "cudnnFinalize failed cudnn_status: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED", true,
       Fault::environment},
      {"build_operation_graph", "CUDNN_BACKEND_API_FAILED",
       "failed with code: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", true,
       Fault::out_of_memory},
      {"lower", "BAD_ALLOC", "out of host memory", true, Fault::out_of_memory},
      {"execute", "CUDA_API_FAILED", "an illegal memory access was encountered", false,
       Fault::broken},
      {"execute", "CUDNN_BACKEND_API_FAILED", "code: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER",
       false, Fault::broken},
      {"create_handle", "CUDNN_BACKEND_API_FAILED", "code: CUDNN_STATUS_NOT_INITIALIZED", false,
       Fault::broken},
      {"create_handle", "HANDLE_ERROR", "", false, Fault::broken},
      {"build_plan", "NVRTC_COMPILATION_FAILED", "", true, Fault::broken},
      {"lower", "EXCEPTION", "an exception of an unknown type", true, Fault::broken},
      {"lower", "EXCEPTION", "No suitable implementation for given SDPA_attributes", true,
       Fault::unsupported},
      {"lower", "EXCEPTION", "Unable to dlopen libcuda.so.1 : not found", true, Fault::environment},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(classify({row.stage, row.code, row.text}, row.deviceless), row.fault)
        << row.stage << " " << row.code << " " << row.text.substr(0, 200);
  }
}

TEST(Reasons, RefusalsOfEngines) {
  const auto refusals = parse_refusals(kArchMismatch);
  ASSERT_EQ(refusals.size(), 3U);
  EXPECT_EQ(refusals[0].engine, 0);
  EXPECT_EQ(refusals[0].status, "NOT_SUPPORTED_GRAPH_PATTERN");
  EXPECT_EQ(refusals[0].knobs, "");
  EXPECT_EQ(refusals[1].engine, 9);
  EXPECT_EQ(refusals[2].engine, 7);
  EXPECT_EQ(refusals[2].knobs, "KERNEL_CFG=7");
  EXPECT_EQ(refusals[2].status, "NOT_SUPPORTED_ARCH_MISMATCH");
  EXPECT_TRUE(parse_refusals("").empty());
  EXPECT_TRUE(parse_refusals("no engines here\n{}").empty());
}

TEST(Reasons, OldArchitecturesNameTheCapabilityNeeded) {
  const StageError failure{"heuristics", "HEURISTIC_QUERY_FAILED", kArchMismatch};
  const auto reasons = explain(failure, matmul(), device("t4", 750), 91900);
  ASSERT_FALSE(reasons.empty());
  EXPECT_EQ(reasons[0].code, "compute_capability");
  EXPECT_EQ(reasons[0].field, "target");
  EXPECT_NE(reasons[0].message.find("t4 has compute capability 7.5"), std::string::npos);
  EXPECT_NE(reasons[0].message.find("8.0 or newer"), std::string::npos);
}

TEST(Reasons, EmptyTextStillYieldsText) {
  for (const char* code : {"GRAPH_NOT_SUPPORTED", "HEURISTIC_QUERY_FAILED"}) {
    const auto reasons = explain({"heuristics", code, ""}, matmul(), device("h200", 900), 91900);
    ASSERT_EQ(reasons.size(), 1U);
    EXPECT_NE(reasons[0].message.find("h200"), std::string::npos);
    EXPECT_NE(reasons[0].message.find("bf16[2, 16, 16]"), std::string::npos);
    EXPECT_FALSE(reasons[0].code.empty());
  }
}

TEST(Reasons, NameTheOperationAndWhereItWasWritten) {
  const auto graph =
      ir::graph_from_json(Json::parse(R"({"lawson": 1, "kind": "graph", "name": "rows",
        "inputs": [{"name": "x", "dtype": "i32", "shape": [4, 8, 16]}],
        "ops": [{"op": "abs", "in": ["x"], "out": "a", "source": "rows.cpp:3"},
                {"op": "reduce_prod", "in": ["a"], "out": "y", "axes": [1],
                 "source": "rows.cpp:4"}],
        "outputs": ["y"]})"),
                          "test");
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  struct Row {
    std::string status;
    std::string text;
    std::string op;
    std::string field;
  };
  for (const Row& row : std::vector<Row>{
           {"DATA_TYPE", "mathPrec != CUDNN_DATA_FLOAT", "op 'abs' (a, at rows.cpp:3)", "a"},
           {"DATA_TYPE", "yType == CUDNN_DATA_FLOAT", "op 'reduce_prod' (y, at rows.cpp:4)", "y"},
           {"GRAPH_PATTERN", "!(reduction_op->isColumnReduction(type))",
            "op 'reduce_prod' (y, at rows.cpp:4)", "y"},
           {"GRAPH_PATTERN", "Unsupported reduction op in the graph.",
            "op 'reduce_prod' (y, at rows.cpp:4)", "y"},
       }) {
    const StageError failure{"heuristics", "HEURISTIC_QUERY_FAILED",
                             fmt::format("No valid engine configs\n{{\"engineId\":1}}\nWarning: "
                                         "CUDNN_STATUS_NOT_SUPPORTED_{}; Reason: {}\n",
                                         row.status, row.text)};
    const auto reasons = explain(failure, *graph, device("h200", 900), 91900);
    ASSERT_FALSE(reasons.empty()) << row.text;
    EXPECT_EQ(reasons[0].message.substr(0, row.op.size()), row.op) << reasons[0].message;
    EXPECT_EQ(reasons[0].field, row.field) << row.text;
    EXPECT_EQ(reasons[0].message.find(row.text), std::string::npos) << reasons[0].message;
  }
}

TEST(Reasons, AttentionNamesAttributeValueAndLimit) {
  struct Row {
    Json changes;
    int compute_capability;
    std::string text;
    std::string code;
    std::string field;
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows{
      {{{"head_dim_qk", 100}},
       900,
       "hidden_dim should be multiple of 8",
       "head_dim",
       "head_dim_qk",
       {"head_dim_qk = 100", "multiple of 8"}},
      {{{"head_dim_v", 36}},
       900,
       "hidden_dim should be multiple of 8",
       "head_dim",
       "head_dim_v",
       {"head_dim_v = 36", "multiple of 8"}},
      {{{"pass", "backward"}, {"head_dim_qk", 512}},
       900,
       "Num hidden_dim should be less than or equal to 256 and hidden_dim should be multiple of 8",
       "head_dim",
       "head_dim_qk",
       {"head_dim_qk = 512", "at most 256", "9.0", "backward"}},
      {{{"pass", "backward"}, {"head_dim_qk", 192}, {"head_dim_v", 64}},
       1000,
       "Num hidden_dim d_v should be equal to 128 if d_qk is 192",
       "head_dim",
       "head_dim_v",
       {"head_dim_qk = 192", "head_dim_v = 64", "128"}},
      {{},
       700,
       "SDPA FP16/BF16 requires SM80 (Ampere) or newer architecture",
       "compute_capability",
       "target",
       {"7.0", "8.0"}},
      {{{"seqlen_q", 256}, {"seqlen_kv", 128}, {"mask", "causal_bottom_right"}},
       900,
       "Bottom right causal mask does not support max_s_q > max_s_kv. Please virtually slice",
       "mask",
       "mask",
       {"seqlen_q = 256", "seqlen_kv = 128"}},
      {{{"bias", "alibi"}},
       900,
       "When alibi mask is used, diagonal_band_right_bound needs to be set to 0.",
       "alibi",
       "mask",
       {"unbounded", "right bound 0"}},
      {{{"seqlen_q", 1}, {"seqlen_kv", 128}, {"softmax", "learnable"}},
       900,
       "decode only mode, i.e. s_q == 1, not supported with sink_token",
       "softmax",
       "softmax",
       {"seqlen_q = 1", "learnable"}},
      {{},
       900,
       "Q: stride 100 of dimension 2 is 200 bytes, not a multiple of the tensor's 16-byte "
       "alignment",
       "strides",
       "strides",
       {"16"}},
  };
  for (const Row& row : rows) {
    const StageError failure{"validate", "GRAPH_NOT_SUPPORTED", row.text};
    const auto reasons =
        explain(failure, attention(row.changes), device("target", row.compute_capability), 91900);
    ASSERT_FALSE(reasons.empty()) << row.text;
    EXPECT_EQ(reasons[0].code, row.code) << row.text;
    EXPECT_EQ(reasons[0].field, row.field) << row.text;
    for (const std::string& part : row.parts) {
      EXPECT_NE(reasons[0].message.find(part), std::string::npos)
          << "'" << part << "' is not in: " << reasons[0].message;
    }
  }
}

TEST(Reasons, UndecidedNamesTheEngine) {
  const StageError failure{"heuristics", "HEURISTIC_QUERY_FAILED", kCublas};
  const auto reasons = explain_undecided(failure, matmul(), device("h200", 900));
  ASSERT_EQ(reasons.size(), 2U);
  EXPECT_EQ(reasons[0].code, "needs_live_device");
  EXPECT_NE(reasons[0].message.find("engine 0 (cuBLASLt)"), std::string::npos);
  EXPECT_EQ(reasons[1].code, "data_type");
}

TEST(Reasons, OfAttentionCublasltSaysNothing) {
  // What engine 0 says of a refused attention differs with what the process judged before.
  const StageError failure{"heuristics", "HEURISTIC_QUERY_FAILED", kCublas};
  const auto graph = attention({{"pass", "backward"}});
  const auto old = explain(failure, graph, device("t4", 750), 91900);
  ASSERT_EQ(old.size(), 1U);
  EXPECT_EQ(old[0].code, "compute_capability");
  const auto reasons = explain(failure, graph, device("h200", 900), 91900);
  ASSERT_EQ(reasons.size(), 1U);
  EXPECT_NE(reasons[0].message.find("engine 7"), std::string::npos) << reasons[0].message;
}

TEST(Reasons, MoreOpsThanCudnnTakesAreAnAnswer) {
  const StageError failure{"build_operation_graph", "CUDNN_BACKEND_API_FAILED",
                           "CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: numOps exceeds "
                           "MAX_OPGRAPH_OPS cudnn_status: CUDNN_STATUS_BAD_PARAM"};
  EXPECT_EQ(classify(failure, true), Fault::unsupported);
  const auto reasons = explain(failure, matmul(), device("h200", 900), 91900);
  ASSERT_EQ(reasons.size(), 1U);
  EXPECT_EQ(reasons[0].code, "graph_size");
  EXPECT_EQ(reasons[0].field, "ops");
  EXPECT_NE(reasons[0].message.find("250"), std::string::npos);
}

TEST(Reasons, WorkspaceNamesBothSizes) {
  const StageError failure{
      "check_support", "GRAPH_EXECUTION_PLAN_CREATION_FAILED",
      "[cudnn_frontend] Error: No execution plans support the graph.\nPlan at index 0: "
      "[cudnn_frontend] Error: Skipping plan since workspace violation. Requires 8589934592"};
  EXPECT_EQ(classify(failure, true), Fault::unsupported);
  const auto reasons = explain(failure, matmul(), device("h200", 900), 91900);
  ASSERT_EQ(reasons.size(), 1U);
  EXPECT_EQ(reasons[0].code, "workspace");
  EXPECT_NE(reasons[0].message.find("8589934592"), std::string::npos);
}

TEST(Reasons, EnvironmentErrorsSayWhatIsMissing) {
  const StageError failure{"heuristics", "HEURISTIC_QUERY_FAILED", kNoNvrtc};
  const Error error = to_error(failure, classify(failure, true), device("h200", 900));
  EXPECT_EQ(error.kind, ErrorKind::unavailable);
  EXPECT_NE(error.message.find("NVRTC"), std::string::npos);
  EXPECT_TRUE(error.reasons.empty());
}

}  // namespace
}  // namespace lawson::cudnn

#include "plan/tuned_plans.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/hash.h"
#include "plan/atomic_file.h"
#include "plan/worker_protocol.h"

namespace lawson::plan {
namespace {

constexpr std::string_view kMagic = "LAWSONT1";
constexpr std::size_t kHashBytes = 32;
constexpr off_t kMaxBytes = off_t{512} << 20;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string{} : std::string{value};
}

Error defect(std::string_view what) {
  return error(ErrorKind::io, "{}", what);
}

class File {
 public:
  explicit File(int fd) : fd_{fd} {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// The whole file; nothing when there is none.
Result<std::optional<std::string>> content_of(const std::string& path) {
  const File file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
  if (file.fd() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::optional<std::string>{};
    return io_error(path, "cannot be opened", errno);
  }
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return io_error(path, "cannot be read", errno);
  if (!S_ISREG(info.st_mode)) return defect("it is not a regular file");
  if (info.st_uid != ::geteuid()) return defect("it belongs to another user");
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) return defect("others may write to it");
  if (info.st_size > kMaxBytes) return defect("it is larger than any file of its kind");
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t have = 0;
  while (have < text.size()) {
    const ssize_t got = ::read(file.fd(), text.data() + have, text.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(path, "cannot be read", errno);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  text.resize(have);
  return std::optional{std::move(text)};
}

// As `mkdir -p`, for this user only.
Status make_folder(const std::string& folder) {
  const std::filesystem::path path{folder};
  std::filesystem::path so_far;
  for (const auto& part : path) {
    so_far /= part;
    if (so_far.empty() || ::mkdir(so_far.c_str(), 0700) == 0 || errno == EEXIST) continue;
    std::error_code ignored;
    if (std::filesystem::is_directory(so_far, ignored)) continue;  // and not ours to write to
    return io_error(folder, "cannot be created", errno);
  }
  return {};
}

}  // namespace

Result<TunedPlans::Config> TunedPlans::environment() {
  Config config;
  const std::string mode = variable("LAWSON_CACHE");
  if (mode == "off") return config;
  if (!mode.empty() && mode != "ro" && mode != "rw") {
    return invalid("LAWSON_CACHE: '{}' is not allowed; expected off, ro or rw", mode);
  }
  std::string root = variable("LAWSON_CACHE_DIR");
  if (root.empty()) {
    const std::string xdg = variable("XDG_CACHE_HOME");
    const std::string home = variable("HOME");
    if (xdg.starts_with('/')) {  // the specification of XDG has relative ones ignored
      root = xdg + "/lawson";
    } else if (!home.empty()) {
      root = home + "/.cache/lawson";
    } else {
      return config;
    }
  }
  config.mode = mode == "ro" ? Mode::ro : Mode::rw;
  config.folder = root + "/tuned";
  return config;
}

std::string TunedPlans::Question::id() const {
  return make_key(graph, device, engine.name(), "", options);
}

std::string TunedPlans::path_of(const Question& question) const {
  return config_.folder + '/' + question.id() + ".tuned";
}

std::optional<Tuned> TunedPlans::find(const Question& question) {
  if (config_.mode == Mode::off) return std::nullopt;
  auto found = read(question);
  if (found.ok()) return std::move(found).value();
  warn(question, found.error().message);
  return std::nullopt;
}

Result<std::optional<Tuned>> TunedPlans::read(const Question& question) const {
  LAWSON_TRY(const std::optional<std::string> text, content_of(path_of(question)));
  if (!text) return std::optional<Tuned>{};
  if (text->size() < kMagic.size() + kHashBytes) return defect("it is truncated");
  if (!text->starts_with(kMagic)) return defect("it does not start with the magic bytes");
  const std::string_view content = std::string_view{*text}.substr(0, text->size() - kHashBytes);
  if (hash_hex(content) != std::string_view{*text}.substr(content.size())) {
    return defect("its checksum does not match: it is truncated or damaged");
  }
  LAWSON_TRY(const Json document, parse_cbor(content.substr(kMagic.size())));
  Tuned tuned;
  std::string chosen;
  try {
    if (document.at("id").get<std::string>() != question.id()) {
      return defect("it answers another question");
    }
    LAWSON_TRY(tuned.report, report_from_json(document.at("report")));
    chosen = document.at("chosen").get<std::string>();
    for (const Json& item : document.at("plans")) {
      LAWSON_TRY(Plan plan, plan_from_json(item));
      const std::string key = make_key(question.graph, question.device, question.engine.name(),
                                       plan.engine_version, question.options);
      if (plan.key != key || plan.engine != question.engine.name() ||
          plan.device_fingerprint != fingerprint(question.device)) {
        return defect(fmt::format("its plan {} is for something else", plan.plan_id));
      }
      tuned.built.push_back(std::move(plan));
    }
  } catch (const Json::exception& e) {
    return defect(e.what());
  }
  const auto found = std::find_if(tuned.built.begin(), tuned.built.end(),
                                  [&](const Plan& plan) { return plan.plan_id == chosen; });
  if (found == tuned.built.end()) return defect("the plan that it chose is missing");
  tuned.plan = *found;
  tuned.plan.choice = tuned.report.choice;
  tuned.report.stored = true;
  return std::optional{std::move(tuned)};
}

void TunedPlans::keep(const Question& question, const Tuned& tuned) {
  if (config_.mode != Mode::rw) return;
  if (const Status written = write(question, tuned); !written.ok()) {
    warn(question, written.error().message);
  }
}

Status TunedPlans::write(const Question& question, const Tuned& tuned) const {
  Json plans = Json::array();
  for (const Plan& plan : tuned.built) plans.push_back(plan_to_json(plan));
  const Json document{{"id", question.id()},
                      {"report", report_to_json(tuned.report)},
                      {"chosen", tuned.plan.plan_id},
                      {"plans", std::move(plans)}};
  std::string text{kMagic};
  Json::to_cbor(document, text);
  text += hash_hex(text);
  LAWSON_CHECK(make_folder(config_.folder));
  AtomicFile file(path_of(question), 0600);
  LAWSON_CHECK(file.write(text));
  return file.publish();
}

void TunedPlans::warn(const Question& question, std::string_view what) {
  const std::string path = path_of(question);
  {
    const std::lock_guard lock{mutex_};
    if (!warned_.insert(path).second) return;
  }
  const std::string text =
      fmt::format("the stored choice of a tuned plan, {}, is of no use: {}", path, what);
  if (config_.warn) {
    config_.warn(text);
  } else {
    std::fprintf(stderr, "lawson: warning: %s\n", text.c_str());
  }
}

}  // namespace lawson::plan

#include "plan/bundle.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "base/compress.h"
#include "base/hash.h"

namespace lawson::plan {
namespace {

namespace fs = std::filesystem;

class BundleTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("lawson-bundle-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    path_ = (folder_ / "plans.bundle").string();
    for (int i = 0; i < 3; ++i) {
      Plan plan;
      plan.key = hash_hex("key " + std::to_string(i));
      plan.plan_id = hash_hex("plan " + std::to_string(i));
      plan.engine = "cudnn";
      plan.engine_version = "9.19.0";
      plan.target = i == 0 ? "h200" : "b200";
      plan.device_fingerprint = hash_hex(plan.target);
      plan.plan_name = "eng" + std::to_string(i);
      plan.workspace_bytes = i;
      plan.graph_json = "{}";
      plan.bytes.assign(static_cast<std::size_t>(i) * 1000, std::byte{0x5A});
      plans_.push_back(std::move(plan));
    }
  }
  void TearDown() override { fs::remove_all(folder_); }

  Status write(const std::string& path) {
    std::vector<const Plan*> pointers;
    for (const Plan& plan : plans_) pointers.push_back(&plan);
    return write_bundle(path, pointers);
  }
  std::string content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void replace(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }

  fs::path folder_;
  std::string path_;
  std::vector<Plan> plans_;
};

TEST_F(BundleTest, RoundTrip) {
  ASSERT_TRUE(write(path_).ok());
  const auto bundle = Bundle::open(path_);
  ASSERT_TRUE(bundle.ok()) << bundle.error().message;
  ASSERT_EQ(bundle->size(), plans_.size());
  for (const Plan& written : plans_) {
    const auto index = bundle->find(written.key);
    ASSERT_TRUE(index);
    const BundleEntry entry = bundle->entry(*index);
    EXPECT_EQ(entry.key, written.key);
    EXPECT_EQ(entry.plan_id, written.plan_id);
    EXPECT_EQ(entry.origin->target, written.target);
    EXPECT_EQ(entry.origin->engine_version, "9.19.0");
    EXPECT_EQ(entry.bytes, plan_to_bytes(written).size());
    const auto plan = bundle->plan(*index);
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    EXPECT_EQ(plan_to_bytes(*plan), plan_to_bytes(written));
  }
  EXPECT_EQ(bundle->origins().size(), 2U);
  EXPECT_FALSE(bundle->find(hash_hex("another")));
  EXPECT_FALSE(bundle->find(""));
  EXPECT_FALSE(bundle->find("zzzz"));
  const auto beyond = bundle->plan(3);
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.error().kind, ErrorKind::invalid_argument);
}

TEST_F(BundleTest, TheContentIsCompressed) {
  plans_[2].bytes.assign(1'000'000, std::byte{0x5A});
  ASSERT_TRUE(write(path_).ok());
  EXPECT_LT(fs::file_size(path_), 10'000U);
  const auto bundle = Bundle::open(path_);
  EXPECT_EQ(bundle->plan(bundle->find(plans_[2].key).value())->bytes, plans_[2].bytes);
}

TEST_F(BundleTest, EmptyAndRepeated) {
  plans_.clear();
  ASSERT_TRUE(write(path_).ok());
  EXPECT_EQ(Bundle::open(path_)->size(), 0U);
  EXPECT_FALSE(Bundle::open(path_)->find(hash_hex("key 0")));
  SetUp();
  plans_.push_back(plans_[0]);
  ASSERT_TRUE(write(path_).ok());
  EXPECT_EQ(Bundle::open(path_)->size(), 3U);
}

TEST_F(BundleTest, OfOneKeyTheFirstIsFound) {
  plans_.push_back(plans_[1]);
  plans_.back().plan_id = hash_hex("0");
  plans_.push_back(plans_[1]);
  plans_.back().plan_id = hash_hex("1");
  ASSERT_TRUE(write(path_).ok());
  const auto bundle = Bundle::open(path_);
  EXPECT_EQ(bundle->size(), 5U);
  EXPECT_EQ(bundle->entry(bundle->find(plans_[1].key).value()).plan_id, plans_[1].plan_id);
}

TEST_F(BundleTest, TenThousandPlansByKey) {
  plans_.resize(10'000, plans_[1]);
  for (std::size_t i = 0; i < plans_.size(); ++i) {
    plans_[i].key = hash_hex("key " + std::to_string(i));
    plans_[i].plan_id = hash_hex("plan " + std::to_string(i));
  }
  ASSERT_TRUE(write(path_).ok());
  const auto bundle = Bundle::open(path_);
  ASSERT_TRUE(bundle.ok()) << bundle.error().message;
  for (std::size_t i = 0; i < plans_.size(); i += 97) {
    const auto index = bundle->find(plans_[i].key);
    ASSERT_TRUE(index);
    EXPECT_EQ(bundle->plan(*index)->plan_id, plans_[i].plan_id);
  }
}

TEST_F(BundleTest, WhatIsNoPlanIsNotWritten) {
  for (const char* word : {"", "k", "0123456789abcdef0123456789abcdeF"}) {
    Plan plan = plans_[0];
    plan.key = word;
    const Plan* pointer = &plan;
    const auto status = write_bundle(path_, {&pointer, 1});
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(status.error().message.find("key"), std::string::npos);
  }
  plans_[0].target = "h200\n";
  EXPECT_EQ(write(path_).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(files(), 0U);
}

TEST_F(BundleTest, AppendingKeepsWhatIsThere) {
  const auto append = [&](const std::vector<Plan>& more) {
    std::vector<const Plan*> pointers;
    for (const Plan& plan : more) pointers.push_back(&plan);
    return append_to_bundle(path_, pointers);
  };
  ASSERT_TRUE(append({plans_[0]}).ok());  // makes the file
  ASSERT_TRUE(append({plans_[1], plans_[2]}).ok());
  const std::string whole = content();
  ASSERT_TRUE(write(path_).ok());
  EXPECT_EQ(Bundle::open(path_)->size(), 3U);

  // One given again replaces the one that is there, and one of the same key is found before it.
  Plan again = plans_[1];
  again.workspace_bytes = 77;
  Plan newer = plans_[2];
  newer.plan_id = hash_hex("newer");
  ASSERT_TRUE(append({again, newer}).ok());
  const auto bundle = Bundle::open(path_);
  ASSERT_EQ(bundle->size(), 4U);
  EXPECT_EQ(bundle->plan(bundle->find(plans_[0].key).value())->plan_id, plans_[0].plan_id);
  EXPECT_EQ(bundle->plan(bundle->find(again.key).value())->workspace_bytes, 77);
  EXPECT_EQ(bundle->plan(bundle->find(newer.key).value())->plan_id, newer.plan_id);

  // A file that is none, or damaged, stays as it is.
  replace("something of the user's");
  EXPECT_EQ(append({again}).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(content(), "something of the user's");
  std::string damaged = whole;
  damaged.back() = static_cast<char>(damaged.back() ^ 1);
  replace(damaged);
  EXPECT_EQ(append({newer}).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(content(), damaged);
  EXPECT_EQ(files(), 1U);
}

TEST_F(BundleTest, EveryTruncationIsAnError) {
  ASSERT_TRUE(write(path_).ok());
  const std::string whole = content();
  for (std::size_t size = whole.size(); size-- > 0;) {
    fs::resize_file(path_, size);
    const auto bundle = Bundle::open(path_);
    ASSERT_FALSE(bundle.ok()) << size;
    EXPECT_EQ(bundle.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(bundle.error().message.find(path_), std::string::npos);
  }
  replace(whole + "x");
  EXPECT_FALSE(Bundle::open(path_).ok());
}

TEST_F(BundleTest, TruncationUnderAReaderIsAnError) {
  ASSERT_TRUE(write(path_).ok());
  const auto bundle = Bundle::open(path_);
  const std::string key{bundle->entry(2).key};
  fs::resize_file(path_, 64);
  EXPECT_EQ(bundle->entry(2).key, key);
  EXPECT_EQ(bundle->plan(2).error().kind, ErrorKind::invalid_argument);
}

TEST_F(BundleTest, EveryChangedBitIsAnError) {
  ASSERT_TRUE(write(path_).ok());
  const std::string whole = content();
  std::fstream file{path_, std::ios::in | std::ios::out | std::ios::binary};
  const auto put = [&](std::size_t at, char byte) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte).flush();
  };
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    put(bit / 8, static_cast<char>(whole[bit / 8] ^ (1 << bit % 8)));
    const auto bundle = Bundle::open(path_);
    bool noticed = !bundle.ok();
    if (bundle.ok()) {
      for (std::size_t p = 0; p < bundle->size(); ++p) {
        const auto plan = bundle->plan(p);
        noticed = noticed || !plan.ok();
        if (!plan.ok()) {
          EXPECT_EQ(plan.error().kind, ErrorKind::invalid_argument);
        }
      }
    }
    EXPECT_TRUE(noticed) << "bit " << bit;
    put(bit / 8, whole[bit / 8]);
  }
}

// A bundle whose checksums are right and that lies.
class Forged {
 public:
  explicit Forged(std::string_view magic = "LAWSONB2") : magic_{magic} {}

  struct Record {
    std::string key = hash_hex("k");
    std::string plan_id = hash_hex("p");
    std::uint64_t offset = 0;  // added to where it is
    std::uint64_t stored_bytes = 0;
    std::uint64_t bytes = 0;
    std::uint32_t origin = 0;
    std::uint32_t zero = 0;
  };
  std::vector<Record> records;
  Json origins = Json::array({{"t", "e", "v", "f"}});
  std::string frame;  // of each record
  std::uint64_t count_more = 0;
  std::uint64_t size_more = 0;

  std::string bytes() const {
    const auto cbor = Json::to_cbor(origins);
    std::string index;
    const std::uint64_t content = 64 + 128 * records.size() + cbor.size();
    for (std::size_t i = 0; i < records.size(); ++i) {
      const Record& record = records[i];
      index += record.key + record.plan_id + hash_hex(frame);
      number(index, content + i * frame.size() + record.offset, 8);
      number(index, frame.size() + record.stored_bytes, 8);
      number(index, record.bytes, 8);
      number(index, record.origin, 4);
      number(index, record.zero, 4);
    }
    index.append(cbor.begin(), cbor.end());
    std::string head = magic_;
    number(head, content + records.size() * frame.size() + size_more, 8);
    number(head, records.size() + count_more, 8);
    number(head, cbor.size(), 8);
    std::string all = head + hash_hex(head + index) + index;
    for (std::size_t i = 0; i < records.size(); ++i) all += frame;
    return all;
  }

 private:
  static void number(std::string& out, std::uint64_t value, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xFF);
  }
  std::string magic_;
};

TEST_F(BundleTest, AnIndexThatLiesIsAnError) {
  const auto message = [&](const Forged& forged) -> std::string {
    replace(forged.bytes());
    const auto bundle = Bundle::open(path_);
    if (bundle.ok()) return "";
    EXPECT_EQ(bundle.error().kind, ErrorKind::invalid_argument);
    return bundle.error().message;
  };
  const auto with = [&](auto change) {
    Forged forged;
    forged.frame = "abcd";
    forged.records.resize(2);
    change(forged);
    return message(forged);
  };
  EXPECT_EQ(with([](Forged&) {}), "");
  using Record = Forged::Record;
  for (const auto& lie : std::initializer_list<Record>{{.offset = 1},
                                                       {.offset = std::uint64_t{1} << 63},
                                                       {.stored_bytes = 1},
                                                       {.stored_bytes = ~std::uint64_t{0}},
                                                       {.bytes = ~std::uint64_t{0}},
                                                       {.origin = 1},
                                                       {.zero = 1},
                                                       {.key = std::string(32, 'g')},
                                                       {.key = std::string(32, '\0')},
                                                       {.plan_id = std::string(32, 'F')}}) {
    for (const std::size_t at : {0U, 1U}) {
      EXPECT_NE(with([&](Forged& forged) { forged.records[at] = lie; }), "");
    }
  }
  EXPECT_NE(with([](Forged& f) { f.records[1].key = std::string(32, '0'); }), "");  // order
  EXPECT_NE(with([](Forged& f) { f.count_more = 1; }), "");
  EXPECT_NE(with([](Forged& f) { f.count_more = std::uint64_t{1} << 57; }), "");  // times 128: 0
  EXPECT_NE(with([](Forged& f) { f.size_more = 1; }), "");
  EXPECT_NE(with([](Forged& f) { f.origins = Json::array(); }), "");
  for (const Json& lie :
       {Json::object(), Json(7), Json::array({1}), Json::array({{"t", "e", "v"}}),
        Json::array({{"t", "e", "v", 1}}), Json::array({{"t\n", "e", "v", "f"}})}) {
    EXPECT_NE(with([&](Forged& forged) { forged.origins = lie; }), "") << lie;
  }
  Json deep = Json::array();
  for (int i = 0; i < 200; ++i) deep = Json::array({deep});
  EXPECT_NE(with([&](Forged& forged) { forged.origins = deep; }), "");
  EXPECT_NE(message(Forged{"LAWSONB1"}).find("format 1; this library reads 2"), std::string::npos);
}

TEST_F(BundleTest, ContentThatLiesIsAnError) {
  const std::vector<std::byte> bytes = plan_to_bytes(plans_[0]);
  const std::string text{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  const auto message = [&](const std::string& frame, std::uint64_t size,
                           const Plan& said) -> std::string {
    Forged forged;
    forged.frame = frame;
    forged.origins = {{said.target, said.engine, said.engine_version, said.device_fingerprint}};
    forged.records = {{.key = said.key, .plan_id = said.plan_id, .bytes = size}};
    replace(forged.bytes());
    const auto bundle = Bundle::open(path_);
    EXPECT_TRUE(bundle.ok()) << bundle.error().message;
    const auto plan = bundle->plan(0);
    if (plan.ok()) return "";
    EXPECT_EQ(plan.error().kind, ErrorKind::invalid_argument);
    return plan.error().message;
  };
  const std::string frame = compress(text).value();
  EXPECT_EQ(message(frame, text.size(), plans_[0]), "");
  EXPECT_NE(message("abcd", 4, plans_[0]).find("not a zstd frame"), std::string::npos);
  EXPECT_NE(message("", 0, plans_[0]), "");
  EXPECT_NE(message(frame, text.size() - 1, plans_[0]), "");
  EXPECT_NE(message(frame, text.size() + 1, plans_[0]), "");
  EXPECT_NE(message(frame + frame, text.size(), plans_[0]), "");
  EXPECT_NE(message(frame.substr(0, frame.size() - 1), text.size(), plans_[0]), "");
  EXPECT_NE(message(compress("no plan").value(), 7, plans_[0]), "");
  // Many zeros: refused by what the index says, before a byte is unpacked.
  const std::string bomb = compress(std::string(std::size_t{64} << 20, '\0')).value();
  EXPECT_LT(bomb.size(), 20'000U);
  EXPECT_NE(message(bomb, text.size(), plans_[0]), "");

  Plan other = plans_[0];
  for (std::string* field : {&other.key, &other.plan_id, &other.target, &other.engine,
                             &other.engine_version, &other.device_fingerprint}) {
    const std::string before = std::exchange(*field, hash_hex("another"));
    EXPECT_NE(message(frame, text.size(), other).find("another one"), std::string::npos);
    *field = before;
  }
}

TEST_F(BundleTest, ReplacesAtomicallyAndLeavesNothing) {
  ASSERT_TRUE(write(path_).ok());
  const auto old = Bundle::open(path_);
  plans_.pop_back();
  ASSERT_TRUE(write(path_).ok());
  EXPECT_EQ(files(), 1U);
  EXPECT_EQ(Bundle::open(path_)->size(), 2U);
  EXPECT_EQ(old->size(), 3U);
  EXPECT_TRUE(old->plan(2).ok());  // the file that was opened is still that file
}

TEST_F(BundleTest, TheModeIsTheUsersUmask) {
  const mode_t before = ::umask(027);
  ASSERT_TRUE(write(path_).ok());
  ::umask(before);
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640U);
}

TEST_F(BundleTest, PlacesThatAreNoFiles) {
  EXPECT_EQ(write(folder_.string()).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(write("/dev/null").error().kind, ErrorKind::invalid_argument);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ(write((folder_ / "none" / "x").string()).error().kind, ErrorKind::io);
  EXPECT_EQ(files(), 0U);

  EXPECT_EQ(Bundle::open((folder_ / "none").string()).error().kind, ErrorKind::io);
  EXPECT_EQ(Bundle::open(folder_.string()).error().kind, ErrorKind::invalid_argument);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(Bundle::open(path_).error().kind, ErrorKind::invalid_argument);
}

}  // namespace
}  // namespace lawson::plan

#include "plan/bundle.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

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
      plan.target = i == 0 ? "h200" : "b200";
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
  ASSERT_EQ(bundle->entries().size(), plans_.size());
  for (std::size_t i : {2U, 0U, 1U}) {
    EXPECT_EQ(bundle->entries()[i].key, plans_[i].key);
    EXPECT_EQ(bundle->entries()[i].target, plans_[i].target);
    const auto plan = bundle->plan(i);
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    EXPECT_EQ(plan->plan_id, plans_[i].plan_id);
    EXPECT_EQ(plan->bytes, plans_[i].bytes);
    EXPECT_EQ(plan->workspace_bytes, plans_[i].workspace_bytes);
  }
  const auto beyond = bundle->plan(3);
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.error().kind, ErrorKind::invalid_argument);
}

TEST_F(BundleTest, EmptyAndRepeated) {
  plans_.clear();
  ASSERT_TRUE(write(path_).ok());
  EXPECT_TRUE(Bundle::open(path_)->entries().empty());
  SetUp();
  plans_.push_back(plans_[0]);
  ASSERT_TRUE(write(path_).ok());
  EXPECT_EQ(Bundle::open(path_)->entries().size(), 3U);
}

TEST_F(BundleTest, EveryTruncationIsAnError) {
  ASSERT_TRUE(write(path_).ok());
  const std::string whole = content();
  for (std::size_t size = 0; size < whole.size(); size += size < 700 ? 1 : 97) {
    replace(whole.substr(0, size));
    const auto bundle = Bundle::open(path_);
    ASSERT_FALSE(bundle.ok()) << size;
    EXPECT_EQ(bundle.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(bundle.error().message.find(path_), std::string::npos);
  }
  replace(whole + "x");
  EXPECT_FALSE(Bundle::open(path_).ok());
}

TEST_F(BundleTest, EveryChangedByteIsAnError) {
  ASSERT_TRUE(write(path_).ok());
  const std::string whole = content();
  std::mt19937 random(3);
  for (std::size_t i = 0; i < whole.size(); i += 1 + random() % 5) {
    std::string changed = whole;
    changed[i] = static_cast<char>(changed[i] ^ (1 << random() % 8));
    replace(changed);
    const auto bundle = Bundle::open(path_);
    bool noticed = !bundle.ok();
    if (bundle.ok()) {
      for (std::size_t p = 0; p < bundle->entries().size(); ++p) {
        const auto plan = bundle->plan(p);
        noticed = noticed || !plan.ok();
        if (!plan.ok()) {
          EXPECT_EQ(plan.error().kind, ErrorKind::invalid_argument);
        }
      }
    }
    EXPECT_TRUE(noticed) << "byte " << i;
  }
}

// A bundle whose checksums are right and whose index lies.
TEST_F(BundleTest, AnIndexThatLiesIsAnError) {
  const auto with_index = [&](const Json& index, std::string_view blobs) {
    std::string head{"LAWSONB1\x01\0\0\0", 12};
    const auto cbor = Json::to_cbor(index);
    for (std::size_t i = 0; i < 8; ++i) {
      head += static_cast<char>((cbor.size() >> (8 * i)) & 0xFF);
    }
    head.append(cbor.begin(), cbor.end());
    replace(head + hash_hex(head) + std::string{blobs});
    return Bundle::open(path_);
  };
  Json entry{{"key", "k"},
             {"plan_id", "p"},
             {"target", "t"},
             {"engine", "e"},
             {"offset", 0},
             {"size", 4},
             {"checksum", hash_hex("abcd")}};
  const auto lies_late = with_index(Json::array({entry}), "abcd");
  ASSERT_TRUE(lies_late.ok()) << lies_late.error().message;
  EXPECT_FALSE(lies_late->plan(0).ok());  // "abcd" is no plan

  EXPECT_FALSE(with_index(Json::object(), "").ok());
  EXPECT_FALSE(with_index(Json::array({1}), "").ok());
  for (const auto& [field, value] :
       std::initializer_list<std::pair<const char*, Json>>{{"offset", 1},
                                                           {"offset", std::uint64_t{1} << 63},
                                                           {"size", 5},
                                                           {"size", ~std::uint64_t{0}},
                                                           {"offset", -1},
                                                           {"size", "four"},
                                                           {"key", 7}}) {
    Json lie = entry;
    lie[field] = value;
    EXPECT_FALSE(with_index(Json::array({lie}), "abcd").ok()) << lie;
  }
  Json deep = Json::array();
  for (int i = 0; i < 200; ++i) deep = Json::array({deep});
  EXPECT_FALSE(with_index(deep, "").ok());
}

TEST_F(BundleTest, ReplacesAtomicallyAndLeavesNothing) {
  ASSERT_TRUE(write(path_).ok());
  const auto old = Bundle::open(path_);
  plans_.pop_back();
  ASSERT_TRUE(write(path_).ok());
  EXPECT_EQ(files(), 1U);
  EXPECT_EQ(Bundle::open(path_)->entries().size(), 2U);
  EXPECT_EQ(old->entries().size(), 3U);
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

// A damaged file is one warning and no answer: cut at every byte, every bit of its head turned
// over, and bits of its content.
#include "store_support.h"

namespace lawson::plan {
namespace {

constexpr std::size_t kHashBytes = 32;

class StoreDamageTest : public StoreTest {
 protected:
  // The file of a small plan, and where its content begins.
  void keep_one() {
    store()->keep(plan_of("k", 5, 64));
    ASSERT_EQ(files().size(), 1U);
    path_ = files()[0];
    whole_ = read(path_);
    const auto head = decode_head(whole_, whole_.size());
    ASSERT_TRUE(head.ok()) << head.error().message;
    content_at_ = head->bytes;
  }

  void expect_no_answer(const std::string& text, const std::string& what) {
    write(path_, text);
    const auto fresh = store();
    EXPECT_FALSE(fresh->plan("k").has_value()) << what;
    EXPECT_EQ(warnings_.size(), 1U) << what;
  }

  std::filesystem::path path_;
  std::string whole_;
  std::size_t content_at_ = 0;
};

TEST_F(StoreDamageTest, CutAtEveryByte) {
  keep_one();
  for (std::size_t size = 0; size < whole_.size(); ++size) {
    expect_no_answer(whole_.substr(0, size), "cut to " + std::to_string(size));
  }
  expect_no_answer(whole_ + '\0', "a byte added");
  expect_no_answer(whole_ + whole_, "twice");
  expect_no_answer(std::string(whole_.size(), '\0'), "all zero");
  write(path_, whole_);
  EXPECT_TRUE(store()->plan("k").has_value());
}

TEST_F(StoreDamageTest, EveryBitOfTheHead) {
  keep_one();
  ASSERT_GT(content_at_, 56 + kHashBytes);
  for (std::size_t at = 0; at < content_at_; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = whole_;
      text[at] = static_cast<char>(text[at] ^ (1 << bit));
      expect_no_answer(text, "bit " + std::to_string(bit) + " of byte " + std::to_string(at));
    }
  }
}

TEST_F(StoreDamageTest, BitsOfTheContent) {
  keep_one();
  for (std::size_t at = content_at_; at < whole_.size(); ++at) {
    std::string text = whole_;
    text[at] = static_cast<char>(text[at] ^ (1 << (at * 5 % 8)));
    expect_no_answer(text, "byte " + std::to_string(at));
  }
}

TEST_F(StoreDamageTest, VerdictsToo) {
  store()->keep(verdict_of("k"));
  const auto path = files().at(0);
  const std::string whole = read(path);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const bool cut : {false, true}) {
      std::string text = cut ? whole.substr(0, at) : whole;
      if (!cut) text[at] = static_cast<char>(text[at] ^ (1 << (at * 3 % 8)));
      write(path, text);
      EXPECT_FALSE(store()->verdict("k", Strength::judged).has_value()) << at;
      EXPECT_EQ(warnings_.size(), 1U) << at;
    }
  }
}

// With every checksum right: only what it says is wrong.
TEST_F(StoreDamageTest, SoundFilesOfSomethingElse) {
  keep_one();
  const auto sealed = [&](EntryKind kind, const std::string& key, const std::string& content) {
    const EntryHeader real = decode_head(whole_, whole_.size())->header;
    return encode_entry({kind, key, real.lawson, "cudnn", "9.19.0", "h200"}, content).value();
  };
  const auto bytes_of = [](const Plan& plan) {
    const auto bytes = plan_to_bytes(plan);
    return std::string{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  };
  expect_no_answer(sealed(EntryKind::plan, "other", bytes_of(plan_of("other"))), "another key");
  expect_no_answer(sealed(EntryKind::plan, "k", bytes_of(plan_of("other"))), "another plan");
  expect_no_answer(sealed(EntryKind::verdict, "k", bytes_of(plan_of("k"))), "another kind");
  Plan deviceless = plan_of("k");
  deviceless.deviceless = true;
  expect_no_answer(sealed(EntryKind::plan, "k", bytes_of(deviceless)), "a deviceless plan");
  expect_no_answer(sealed(EntryKind::plan, "k", "no plan"), "no plan");
  expect_no_answer(sealed(EntryKind::plan, "k", ""), "nothing");
  std::string verdict;
  Json::to_cbor(verdict_to_json(verdict_of("k")), verdict);
  expect_no_answer(sealed(EntryKind::plan, "k", verdict), "a verdict");
  write(path_, sealed(EntryKind::plan, "k", bytes_of(plan_of("k", 9))));
  EXPECT_EQ(store()->plan("k")->plan_id, "k/9");
  EXPECT_TRUE(warnings_.empty());
}

}  // namespace
}  // namespace lawson::plan

// The store: what is kept is found, in other processes too; what cannot be trusted is as if it were
// not there; what is old leaves.
#include "plan/store.h"

#include <barrier>
#include <thread>

#include "plan/store_build.h"
#include "plan/store_folder.h"
#include "store_support.h"

namespace lawson::plan {
namespace {

namespace fs = std::filesystem;

std::string name_of(const std::string& key) {
  return entry_name({EntryKind::plan, key, library_build(), "", "", ""});
}

TEST_F(StoreTest, AnotherProcessFindsWhatWasKept) {
  EXPECT_FALSE(store()->plan("k").has_value());
  EXPECT_TRUE(files().empty());  // asking creates nothing
  store()->keep(plan_of("k", 7));
  ASSERT_EQ(files().size(), 1U);
  struct stat info {};
  for (const fs::path& path : {folder(), folder().parent_path()}) {
    ASSERT_EQ(::stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777U, 0700U);
  }
  ASSERT_EQ(::stat(files()[0].c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0600U);

  const auto found = store()->plan("k");
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(plan_to_bytes(*found), plan_to_bytes(plan_of("k", 7)));
  EXPECT_FALSE(store()->plan("other").has_value());
  EXPECT_FALSE(store()->verdict("k", Strength::judged).has_value());
  store()->keep(plan_of("k", 8));
  EXPECT_EQ(files().size(), 1U);
  EXPECT_EQ(store()->plan("k")->plan_id, "k/8");
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(StoreTest, AVerdictSettlesWhatIsNotStrongerThanIt) {
  Verdict verdict = verdict_of("k", Decision::supported, Strength::built);
  verdict.plan_id = "p";
  verdict.reasons = {{"code", "message", "field"}};
  verdict.workspace_bytes = 12;
  store()->keep(verdict);
  for (const Strength strength : {Strength::judged, Strength::built}) {
    const auto found = store()->verdict("k", strength);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(verdict_to_json(*found), verdict_to_json(verdict));
  }
  EXPECT_FALSE(store()->verdict("k", Strength::verified).has_value());
  store()->keep(verdict_of("no", Decision::unsupported));
  EXPECT_TRUE(store()->verdict("no", Strength::verified).has_value());
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(StoreTest, AVerdictIsNotReplacedByOneThatSaysLess) {
  store()->keep(verdict_of("k", Decision::supported, Strength::verified));
  store()->keep(verdict_of("k", Decision::supported, Strength::judged));
  EXPECT_TRUE(store()->verdict("k", Strength::verified).has_value());
}

// A machine with the device and one without it may share a folder.
TEST_F(StoreTest, WithTheDeviceAndWithoutItAreTwoQuestions) {
  Verdict verdict = verdict_of("k");
  verdict.evidence = Evidence::deviceless_measured_target;
  store()->keep(verdict);
  Plan plan = plan_of("k", 1);
  plan.deviceless = true;
  store()->keep(plan);
  EXPECT_FALSE(store()->verdict("k", Strength::judged).has_value());
  EXPECT_FALSE(store()->plan("k").has_value());
  EXPECT_EQ(store()->find_plan("k")->plan_id, "k/1");
  store()->keep(verdict_of("k"));
  store()->keep(plan_of("k", 2));
  EXPECT_EQ(files().size(), 4U);
  EXPECT_EQ(store()->verdict("k", Strength::judged)->evidence, Evidence::live);
  EXPECT_EQ(store()->verdict("k", Strength::judged, true)->evidence,
            Evidence::deviceless_measured_target);
  EXPECT_EQ(store()->plan("k")->plan_id, "k/2");
  EXPECT_EQ(store()->plan("k", true)->plan_id, "k/1");
  EXPECT_EQ(store()->find_plan("k")->plan_id, "k/2");
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(StoreTest, UndecidedAndOfNoBuildIsNotKept) {
  store()->keep(verdict_of("k", Decision::undecided));
  Verdict of_nobody = verdict_of("k");
  of_nobody.engine_version.clear();
  store()->keep(of_nobody);
  EXPECT_TRUE(files().empty());
}

TEST_F(StoreTest, Modes) {
  store(Store::Mode::off)->keep(plan_of("k"));
  store(Store::Mode::ro)->keep(plan_of("k"));
  store(Store::Mode::ro)->keep(verdict_of("k"));
  EXPECT_FALSE(fs::exists(folder()));
  store()->keep(plan_of("k"));
  age(files()[0], 1000);
  const auto before = fs::last_write_time(files()[0]);
  EXPECT_TRUE(store(Store::Mode::ro)->plan("k").has_value());
  EXPECT_EQ(fs::last_write_time(files()[0]), before);  // read-only leaves no mark
  EXPECT_FALSE(store(Store::Mode::off)->plan("k").has_value());
  EXPECT_TRUE(warnings_.empty());

  const auto refused = store(Store::Mode::ro)->add(plan_of("k"));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::unavailable);
  EXPECT_NE(refused.error().message.find("read-only"), std::string::npos);
  EXPECT_FALSE(store(Store::Mode::ro)->prune({}).ok());
  EXPECT_FALSE(store(Store::Mode::off)->list().ok());
}

TEST_F(StoreTest, OneWarningForEachKind) {
  const auto fresh = store();
  for (const char* key : {"a", "b"}) fresh->keep(plan_of(key));
  fresh->keep(verdict_of("c"));
  for (const fs::path& path : files()) write(path, "x");
  const auto shared = store();
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(shared->plan("a").has_value());
    EXPECT_FALSE(shared->plan("b").has_value());
    EXPECT_FALSE(shared->verdict("c", Strength::judged).has_value());
  }
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find(folder().string()), std::string::npos);
  EXPECT_NE(warnings_[0].find("truncated"), std::string::npos);
  shared->reject(EntryKind::plan, "a", "made for something else");
  EXPECT_EQ(warnings_.size(), 1U);
  fs::permissions(folder(), fs::perms::others_write, fs::perm_options::add);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(shared->plan("a").has_value());
    shared->keep(plan_of("a"));
  }
  ASSERT_EQ(warnings_.size(), 2U);
  EXPECT_NE(warnings_[1].find("others may write"), std::string::npos);
}

TEST_F(StoreTest, WhatIsNoFileOfOursIsNotFollowed) {
  const auto check = [&](const std::string& word) {
    const auto fresh = store();
    EXPECT_FALSE(fresh->plan("k").has_value()) << word;
    ASSERT_EQ(warnings_.size(), 1U) << word;
    EXPECT_NE(warnings_[0].find(word), std::string::npos) << warnings_[0];
  };
  store()->keep(plan_of("k"));
  const fs::path path = files().at(0);
  const std::string whole = read(path);
  write(root_ / "elsewhere", whole);
  fs::remove(path);
  fs::create_symlink(root_ / "elsewhere", path);
  check("symbolic link");
  store()->keep(plan_of("k", 3));  // replaces the link, not what it points to
  EXPECT_EQ(read(root_ / "elsewhere"), whole);
  EXPECT_EQ(store()->plan("k")->plan_id, "k/3");

  fs::permissions(path, fs::perms::group_write, fs::perm_options::add);
  check("others may write");
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  check("not a regular file");
  fs::remove(path);
  fs::create_directory(path);
  check("not a regular file");
  fs::remove(path);

  fs::rename(folder(), root_ / "moved");
  fs::create_symlink(root_ / "moved", folder());
  check("symbolic link");
  store()->keep(plan_of("k"));
  EXPECT_TRUE(fs::is_empty(root_ / "moved"));
  fs::remove(folder());
  write(folder(), "a file where a folder should be");
  check("no folder");
  fs::remove_all(root_ / "cache");
  fs::create_symlink(root_ / "moved", root_ / "cache");  // above the store links are the user's own
  store()->keep(plan_of("k"));
  EXPECT_TRUE(store()->plan("k").has_value());
}

TEST_F(StoreTest, WhatBelongsToAnotherUserIsIgnored) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files to another user";
  store()->keep(plan_of("k"));
  const fs::path path = files().at(0);
  ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
  EXPECT_FALSE(store()->plan("k").has_value());
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("another user"), std::string::npos);
  store()->keep(plan_of("k", 2));  // in its place
  EXPECT_EQ(store()->plan("k")->plan_id, "k/2");
  ASSERT_EQ(::chown(folder().c_str(), kNobody, kNobody), 0);
  const auto fresh = store();
  EXPECT_FALSE(fresh->plan("k").has_value());
  fresh->keep(plan_of("k", 3));
  EXPECT_EQ(warnings_.size(), 1U);
  EXPECT_EQ(files().size(), 1U);
}

TEST_F(StoreTest, RootsMayBeReadByAll) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs files of root";
  store()->keep(plan_of("k"));
  for (const fs::path& path : {root_, folder().parent_path(), folder(), files()[0]}) {
    ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  }
  EXPECT_EQ(in_child([&] {
              if (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) return 2;
              const auto fresh = store();
              const bool found = fresh->plan("k").has_value() && warnings_.empty();
              for (int i = 0; i < 3; ++i) fresh->keep(plan_of("k", 1));
              return found && warnings_.size() == 1 ? 0 : 1;
            }),
            0);
  EXPECT_EQ(store()->plan("k")->plan_id, "k/0");
}

TEST_F(StoreTest, AnotherBuildOfLawsonHasEntriesOfItsOwn) {
  store()->keep(plan_of("k", 1));
  EntryHeader header{EntryKind::plan, "k", "0.0.1+other", "cudnn", "9.19.0", "h200"};
  const auto bytes = plan_to_bytes(plan_of("k", 2));
  const auto text =
      encode_entry(header, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  write(folder() / entry_name(header), *text);
  EXPECT_EQ(store()->plan("k")->plan_id, "k/1");
  const auto entries = store()->list();
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 2U);
  for (const StoredEntry& entry : *entries) EXPECT_EQ(entry.defect, "");

  // Under a name of this build's the file still says whose it is.
  fs::rename(folder() / entry_name(header), folder() / name_of("k"));
  EXPECT_FALSE(store()->plan("k").has_value());
  EXPECT_EQ(warnings_.size(), 1U);
}

TEST_F(StoreTest, CheckNamesWhatIsBadAndRemovesIt) {
  for (const char* key : {"a", "b", "c"}) store()->keep(plan_of(key));
  store()->keep(verdict_of("a"));
  write(folder() / "notes.txt", "a file of the user's own");
  const std::string good = read(files()[0]);
  EXPECT_EQ(store()->check(false)->size(), 4U);
  const fs::path bad = files()[1];
  std::string text = read(bad);
  text.back() = static_cast<char>(text.back() ^ 1);
  write(bad, text);
  // The head alone does not show it.
  const auto listed = store()->list();
  EXPECT_TRUE(std::all_of(listed->begin(), listed->end(),
                          [](const StoredEntry& entry) { return entry.defect.empty(); }));
  for (const bool remove : {false, true}) {
    const auto checked = store()->check(remove);
    ASSERT_TRUE(checked.ok());
    int defects = 0;
    for (const StoredEntry& entry : *checked) {
      if (entry.defect.empty()) continue;
      ++defects;
      EXPECT_EQ(entry.file, bad.filename());
      EXPECT_NE(entry.defect.find("checksum of its content"), std::string::npos);
      EXPECT_EQ(entry.removed, remove);
    }
    EXPECT_EQ(defects, 1);
  }
  EXPECT_FALSE(fs::exists(bad));
  EXPECT_TRUE(fs::exists(folder() / "notes.txt"));
  EXPECT_EQ(store()->check(false)->size(), 3U);
}

TEST_F(StoreTest, TheLeastRecentlyUsedLeave) {
  constexpr int kPlans = 10;
  const auto name = [](int i) { return "key-" + std::to_string(i); };
  std::uint64_t each = 0;
  for (int i = 0; i < kPlans; ++i) {
    store()->keep(plan_of(name(i), 0, 10000));
    const fs::path path = folder() / name_of(name(i));
    each = fs::file_size(path);
    age(path, 1000 - 10 * i);
  }
  EXPECT_TRUE(store()->plan(name(0)).has_value());  // used now
  // The first write of a process surveys the folder: down to 90 % of the budget.
  store(Store::Mode::rw, each * 10)->keep(plan_of("new", 0, 10000));
  const auto there = [&](const std::string& key) { return fs::exists(folder() / name_of(key)); };
  EXPECT_TRUE(there(name(0)));
  EXPECT_FALSE(there(name(1)));
  EXPECT_FALSE(there(name(2)));
  EXPECT_TRUE(there(name(3)));
  EXPECT_TRUE(there("new"));
  EXPECT_EQ(files().size(), 9U);

  // What was used within the last minute stays even where there is no room for it.
  store(Store::Mode::rw, each * 2)->keep(plan_of("newer", 0, 10000));
  EXPECT_TRUE(there(name(0)) && there("new") && there("newer"));
  EXPECT_EQ(files().size(), 3U);
  // Larger than all there may be: not kept, and nothing leaves for it.
  store(Store::Mode::rw, each * 2)->keep(plan_of("huge", 0, 30000));
  EXPECT_EQ(files().size(), 3U);
  EXPECT_TRUE(warnings_.empty());

  age(folder() / name_of("new"), 500);
  PruneRules rules;
  rules.max_age_ns = std::int64_t{400} * 1'000'000'000;
  EXPECT_EQ(store()->prune(rules)->removed, 1U);
  rules = {};
  rules.max_bytes = each;
  const auto pruned = store()->prune(rules);
  EXPECT_EQ(pruned->removed, 1U);
  EXPECT_EQ(pruned->kept_bytes, each);
  rules.max_bytes = 0;
  EXPECT_EQ(store()->prune(rules)->kept, 0U);
}

TEST_F(StoreTest, WhatKilledWritersLeftIsClearedAway) {
  store()->keep(plan_of("k"));
  const fs::path old = files()[0].string() + ".tmp.1.0";
  const fs::path young = files()[0].string() + ".tmp.1.1";
  write(old, "x");
  write(young, "x");
  age(old, 2 * 3600);
  store()->keep(plan_of("k"));
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(young));
}

TEST_F(StoreTest, AReaderKeepsWhatIsRemoved) {
  store()->keep(plan_of("k"));
  std::ifstream reader(files()[0], std::ios::binary);
  PruneRules everything;
  everything.max_bytes = 0;
  EXPECT_EQ(store()->prune(everything)->removed, 1U);
  const std::string text{std::istreambuf_iterator<char>(reader), {}};
  EXPECT_TRUE(decode_entry(text).ok());
}

TEST_F(StoreTest, ThreadsShareOne) {
  const auto shared = store();
  constexpr int kThreads = 8;
  std::atomic<int> wrong{0};
  {
    std::barrier start(kThreads);
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        for (int i = 0; i < 50; ++i) {
          const std::string key = "k" + std::to_string((i + t) % 5);
          if (i % 2 == 0) shared->keep(plan_of(key, t));
          const auto found = shared->plan(key);
          wrong += found && !is_plan_of(*found, key) ? 1 : 0;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(warnings_.empty());
  EXPECT_EQ(files().size(), 5U);
}

TEST(StoreEnvironment, SaysWhere) {
  const auto with = [](const char* mode, const char* folder, const char* xdg, const char* home) {
    const auto set = [](const char* name, const char* value) {
      if (value == nullptr) {
        ::unsetenv(name);
      } else {
        ::setenv(name, value, 1);
      }
    };
    set("LAWSON_CACHE", mode);
    set("LAWSON_CACHE_DIR", folder);
    set("XDG_CACHE_HOME", xdg);
    set("HOME", home);
    return Store::environment();
  };
  const auto home = std::string{std::getenv("HOME") == nullptr ? "/" : std::getenv("HOME")};
  EXPECT_EQ(with(nullptr, nullptr, nullptr, "/u")->folder, "/u/.cache/lawson/store");
  EXPECT_EQ(with(nullptr, nullptr, "/xdg", "/u")->folder, "/xdg/lawson/store");
  EXPECT_EQ(with(nullptr, nullptr, "relative", "/u")->folder, "/u/.cache/lawson/store");
  EXPECT_EQ(with("rw", "/mine", "/xdg", "/u")->folder, "/mine/store");
  EXPECT_EQ(with("rw", "/mine", nullptr, nullptr)->mode, Store::Mode::rw);
  EXPECT_EQ(with("ro", "/mine", nullptr, nullptr)->mode, Store::Mode::ro);
  EXPECT_EQ(with("off", "/mine", nullptr, nullptr)->mode, Store::Mode::off);
  EXPECT_EQ(with(nullptr, nullptr, nullptr, nullptr)->mode, Store::Mode::off);
  const auto wrong = with("yes", "/mine", nullptr, nullptr);
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(wrong.error().message.find("'yes' is not allowed; expected off, ro or rw"),
            std::string::npos);
  static_cast<void>(with(nullptr, nullptr, nullptr, home.c_str()));
}

}  // namespace
}  // namespace lawson::plan

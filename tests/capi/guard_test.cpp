// Whatever happens inside, a C function returns a status and leaves a message.
#include "capi/guard.h"

#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

namespace lawson::capi {
namespace {

struct Odd {};

TEST(Guard, EveryExceptionBecomesAStatus) {
  EXPECT_EQ(guard([]() -> Status { throw std::runtime_error("broken"); }), LAWSON_INTERNAL);
  EXPECT_STREQ(lawson_last_error_message(), "broken");
  EXPECT_EQ(guard([]() -> Status { throw std::bad_alloc(); }), LAWSON_OUT_OF_MEMORY);
  EXPECT_EQ(guard([]() -> Status { throw 7; }), LAWSON_INTERNAL);
  EXPECT_STREQ(lawson_last_error_message(), "an exception that is not a std::exception");
  EXPECT_EQ(guard([]() -> Status { throw Odd{}; }), LAWSON_INTERNAL);
  EXPECT_EQ(guard([]() -> Status { throw "text"; }), LAWSON_INTERNAL);
}

TEST(Guard, EveryKindHasItsStatus) {
  EXPECT_EQ(guard([]() -> Status { return Status{}; }), LAWSON_OK);
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::internal); ++kind) {
    const auto error_kind = static_cast<ErrorKind>(kind);
    EXPECT_EQ(guard([&]() -> Status { return Error{error_kind, "message", {}}; }), kind + 1);
    EXPECT_STREQ(lawson_status_string(static_cast<lawson_status>(kind + 1)), to_string(error_kind));
  }
  EXPECT_EQ(guard([]() -> Status { return Error{ErrorKind::io, "", {}}; }), LAWSON_IO);
  EXPECT_STREQ(lawson_last_error_message(), "I/O error");
}

TEST(Guard, MessagesArePerThreadAndBounded) {
  EXPECT_EQ(guard([]() -> Status { return invalid("mine"); }), LAWSON_INVALID_ARGUMENT);
  std::thread([] {
    EXPECT_STREQ(lawson_last_error_message(), "");
    EXPECT_EQ(guard([]() -> Status { return invalid("theirs"); }), LAWSON_INVALID_ARGUMENT);
  }).join();
  EXPECT_STREQ(lawson_last_error_message(), "mine");
  EXPECT_EQ(guard([]() -> Status { return invalid("{}", std::string(1 << 20, 'x')); }),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_LE(std::strlen(lawson_last_error_message()), std::size_t{64} << 10);
}

struct Versioned {
  std::size_t struct_size;
  std::int64_t first;
  std::int64_t second;
};

constexpr std::array kPrefixes{offsetof(Versioned, second)};

TEST(Structs, OlderAndNewerCallers) {
  Versioned target{0, 1, 2};
  Versioned given{sizeof(Versioned), 10, 20};
  ASSERT_TRUE(read_struct(&given, target, "versioned", kPrefixes).ok());
  EXPECT_EQ(target.second, 20);

  target = {0, 1, 2};
  given.struct_size = offsetof(Versioned, second);  // knew only `first`
  ASSERT_TRUE(read_struct(&given, target, "versioned", kPrefixes).ok());
  EXPECT_EQ(target.first, 10);
  EXPECT_EQ(target.second, 2);

  struct Newer {
    Versioned known;
    std::int64_t third;
  } newer{{sizeof(Newer), 10, 20}, 0};
  EXPECT_TRUE(read_struct(&newer.known, target, "versioned", kPrefixes).ok());
  newer.third = 1;
  EXPECT_FALSE(read_struct(&newer.known, target, "versioned", kPrefixes).ok());

  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{17}, std::size_t{1} << 40}) {
    given.struct_size = size;
    const Status status = read_struct(&given, target, "versioned", kPrefixes);
    ASSERT_FALSE(status.ok()) << size;
    EXPECT_NE(status.error().message.find("struct_size"), std::string::npos);
  }
  EXPECT_TRUE(read_struct<Versioned>(nullptr, target, "versioned", kPrefixes).ok());
}

}  // namespace
}  // namespace lawson::capi

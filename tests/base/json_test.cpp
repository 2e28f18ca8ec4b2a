// Untrusted documents: every error names file, field, value and what was allowed.
#include "base/json.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

namespace lawson {
namespace {

std::string parse_error(std::string_view text) {
  const auto result = parse_json(text, "a.json");
  EXPECT_FALSE(result.ok());
  if (result.ok()) return {};
  EXPECT_EQ(result.error().kind, ErrorKind::invalid_argument);
  EXPECT_TRUE(result.error().message.starts_with("a.json: ")) << result.error().message;
  for (const char c : result.error().message) EXPECT_LT(static_cast<unsigned char>(c), 0x80);
  return result.error().message;
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(ParseJson, SaysWhereADocumentIsBroken) {
  EXPECT_TRUE(has(parse_error("{\n \"a\": }"), "line 2"));
  EXPECT_TRUE(has(parse_error(""), "not a JSON document"));
  parse_error("{\"a\": NaN}");
  parse_error("{\"a\": 1} x");
  parse_error("{\"a\": 1e999}");
  parse_error("{\"a\": \"\xff\xfe\"}");
  parse_error(std::string_view{"{\"a\": \"\0\"}", 10});
  parse_error("\xef\xbb");
}

TEST(ParseJson, BoundsDepthWithoutRecursion) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') +
           std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_TRUE(parse_json(nested(kMaxDocumentDepth), "a.json").ok());
  EXPECT_TRUE(has(parse_error(nested(kMaxDocumentDepth + 1)), "64 levels"));
  EXPECT_TRUE(has(parse_error(nested(2'000'000)), "64 levels"));
  parse_error(std::string(2'000'000, '['));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  parse_error(objects);
}

TEST(ParseJson, BoundsSize) {
  const std::string large(kMaxDocumentBytes + 1, ' ');
  EXPECT_TRUE(has(parse_error(large), "8388609 bytes"));
}

class ReadFile : public testing::Test {
 protected:
  std::string path() const {
    return testing::TempDir() + "lawson_read_file_" + std::to_string(::getpid());
  }
  void TearDown() override { std::remove(path().c_str()); }
};

TEST_F(ReadFile, ReadsUpToItsLimit) {
  std::ofstream(path()) << "twelve bytes";
  EXPECT_EQ(read_file(path()).value(), "twelve bytes");
  EXPECT_EQ(read_file(path(), 12).value(), "twelve bytes");
  const auto result = read_file(path(), 11);
  ASSERT_FALSE(result.ok());
  EXPECT_TRUE(has(result.error().message, "larger than 11 bytes"));
}

TEST_F(ReadFile, NamesWhatCannotBeRead) {
  const auto missing = read_file(path());
  ASSERT_FALSE(missing.ok());
  EXPECT_TRUE(has(missing.error().message, path()));
  EXPECT_TRUE(has(missing.error().message, "No such file"));
  EXPECT_FALSE(read_file(testing::TempDir()).ok());
}

TEST_F(ReadFile, StopsAtItsLimitOfAnEndlessFile) {
  const auto result = read_file("/dev/zero", 1 << 20);
  ASSERT_FALSE(result.ok());
  EXPECT_TRUE(has(result.error().message, "1048576"));
}

class Reader : public testing::Test {
 protected:
  template <typename T>
  static std::string message(const Result<T>& result) {
    EXPECT_FALSE(result.ok());
    return result.ok() ? "" : result.error().message;
  }

  const Json document_ = Json::parse(R"({
    "count": 3, "large": 9223372036854775808, "negative": -2, "real": 2.5, "text": "abc",
    "yes": true, "list": [1, 2], "mixed": [1, "x"], "nothing": null, "object": {"inner": 1}})");
  ObjectReader reader_{document_, "a.json", "top"};
};

TEST_F(Reader, ReadsWhatIsThere) {
  EXPECT_EQ(reader_.integer("count", 0, 10).value(), 3);
  EXPECT_EQ(reader_.integer_or("absent", 7, 0, 10).value(), 7);
  EXPECT_EQ(reader_.integer_or("nothing", 7, 0, 10).value(), 7);
  EXPECT_EQ(reader_.number_or("real", 0).value(), 2.5);
  EXPECT_EQ(reader_.number_or("count", 0).value(), 3);
  EXPECT_EQ(reader_.string("text").value(), "abc");
  EXPECT_TRUE(reader_.boolean_or("yes", false).value());
  EXPECT_EQ(reader_.integers("list", 0, 9).value(), (Dims{1, 2}));
  EXPECT_FALSE(reader_.has("nothing"));
}

TEST_F(Reader, NamesFieldValueAndWhatIsAllowed) {
  EXPECT_EQ(message(reader_.integer("negative", 0, 10)),
            "a.json: field 'top.negative': -2 is not allowed; expected an integer from 0 to 10");
  EXPECT_TRUE(has(message(reader_.integer("large", 0, INT64_MAX)), "9223372036854775808"));
  EXPECT_TRUE(has(message(reader_.integer("real", 0, 10)), "2.5"));
  EXPECT_TRUE(has(message(reader_.integer("text", 0, 10)), "\"abc\""));
  EXPECT_TRUE(has(message(reader_.integer("absent", 0, 10)), "missing"));
  EXPECT_TRUE(has(message(reader_.integer("yes", 0, 10)), "true"));
  EXPECT_TRUE(has(message(reader_.number_or("text", 0)), "a finite number"));
  EXPECT_TRUE(has(message(reader_.boolean_or("count", false)), "true or false"));
  EXPECT_TRUE(has(message(reader_.string("count")), "a string"));
  EXPECT_TRUE(has(message(reader_.integers("mixed", 0, 9)), "top.mixed[1]"));
  EXPECT_TRUE(has(message(reader_.integers("list", 0, 1)), "top.list[1]"));
  EXPECT_TRUE(has(message(reader_.integers("count", 0, 1)), "a list of integers"));
}

TEST_F(Reader, SuggestsTheNearestChoice) {
  EXPECT_TRUE(has(message(reader_.choice_or("text", "", {"abd", "xyz"})), "nearest: abd"));
  EXPECT_EQ(reader_.choice_or("text", "", {"abc"}).value(), "abc");
  EXPECT_EQ(reader_.choice_or("absent", "abc", {"abc"}).value(), "abc");
}

TEST_F(Reader, RefusesFieldsThatNobodyAskedFor) {
  const Json document = {{"heads", 1}, {"seqlen_qq", 2}};
  ObjectReader reader(document, "a.json");
  reader.find("heads");
  reader.find("seqlen_q");
  const Status status = reader.finish();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().message,
            "a.json: field 'seqlen_qq': unknown field; did you mean 'seqlen_q'?");
}

TEST_F(Reader, RefusesWhatIsNoObject) {
  for (const char* text : {"[]", "3", "\"text\"", "null", "true"}) {
    const Json document = Json::parse(text);
    ObjectReader reader(document, "a.json");
    EXPECT_FALSE(reader.has("a"));
    ASSERT_FALSE(reader.finish().ok()) << text;
    EXPECT_TRUE(has(reader.finish().error().message, "expected an object"));
  }
}

TEST_F(Reader, ShortensLongValues) {
  const Json document = {{"a", std::string(100'000, 'x')}};
  ObjectReader reader(document, "a.json");
  EXPECT_LT(message(reader.integer("a", 0, 1)).size(), 200U);
}

TEST_F(Reader, LongUnknownFieldsStayReadable) {
  Json document = Json::object();
  document[std::string(100'000, 'y')] = 1;
  ObjectReader reader(document, "a.json");
  reader.find("a");
  ASSERT_FALSE(reader.finish().ok());
  EXPECT_LT(reader.finish().error().message.size(), 300U);
}

TEST(NearestName, FindsTypingErrorsOnly) {
  const std::vector<std::string> known{"matmul", "softmax", "reduce_sum"};
  EXPECT_EQ(nearest_name("mathmul", known), "matmul");
  EXPECT_EQ(nearest_name("sofmtax", known), "softmax");
  EXPECT_EQ(nearest_name("convolution", known), "");
  EXPECT_EQ(nearest_name(std::string(1'000'000, 'm'), known).size() < 20, true);
}

}  // namespace
}  // namespace lawson

#include "engine/cudnn/targets.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "engine/cudnn/devices.h"

namespace lawson::cudnn {
namespace {

TEST(Targets, EveryFileIsATargetWithItsOwnNames) {
  std::size_t files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator{LAWSON_SOURCE_DIR "/src/engine/cudnn/targets"}) {
    if (entry.path().extension() == ".json") ++files;
  }
  EXPECT_EQ(kTargetFiles.size(), files);
  EXPECT_EQ(known_targets().size(), files);
  std::map<std::string, std::string> owner;
  std::set<std::string> fields;
  for (const TargetFile& file : kTargetFiles) {
    auto document = parse_json(file.text, file.name);
    ASSERT_TRUE(document.ok()) << document.error().message;
    auto device = device_from_json(*document, file.name);
    ASSERT_TRUE(device.ok()) << device.error().message;
    EXPECT_EQ(device->name + ".json", file.name);
    std::vector<std::string> names = device->aliases;
    names.push_back(device->name);
    for (const std::string& name : names) {
      EXPECT_EQ(owner.count(name), 0U) << name << " is in " << owner[name] << " and " << file.name;
      owner[name] = file.name;
    }
    std::set<std::string> own;
    for (const auto& [field, value] : device->properties.items()) own.insert(field);
    if (fields.empty()) fields = own;
    EXPECT_EQ(own, fields) << file.name;
    EXPECT_FALSE(document->at("sources").empty()) << file.name;
  }
}

TEST(Targets, TheOnesThatAreAskedFor) {
  for (const char* name : {"v100", "t4", "a100", "a10", "l40s", "rtx4090", "h100-sxm", "h100-pcie",
                           "h200", "b200", "gb300", "rtx5090"}) {
    bool found = false;
    for (const Device& device : known_targets()) {
      if (device.name != name) continue;
      found = true;
      EXPECT_FALSE(device.present());
      EXPECT_NE(device.evidence, Evidence::live);
    }
    EXPECT_TRUE(found) << name;
  }
}

}  // namespace
}  // namespace lawson::cudnn

// The loader's state belongs to the process, so every case runs in a child of its own.
#include "engine/cudnn/loader.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

namespace lawson::cudnn {
namespace {

const std::string kFakes = FAKE_LIBRARIES;
const std::string kA = kFakes + "/fake-a";  // cuDNN 9.19.0, NVRTC 13
const std::string kB = kFakes + "/fake-b";  // cuDNN 9.1.0

// What `work` returns in a child process.
std::string in_child(const std::function<std::string()>& work) {
  std::array<int, 2> ends{};
  EXPECT_EQ(pipe(ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = work();
    const auto written = write(ends[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  std::array<char, 512> buffer{};
  for (ssize_t size = 0; (size = read(ends[0], buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child ended badly: " << text;
  return text;
}

// "path version found" of cuDNN and NVRTC, or "kind: message".
std::string load() {
  const auto found = libraries();
  if (!found.ok()) return std::string{to_string(found.error().kind)} + ": " + found.error().message;
  return fmt::format("{} {} {}; {} {} {}", (*found)->cudnn.path, (*found)->cudnn.version,
                     (*found)->cudnn.found, (*found)->nvrtc.path, (*found)->nvrtc.version,
                     (*found)->nvrtc.found);
}

std::string load_with(const std::string& cudnn, const std::string& nvrtc = "") {
  return in_child([&] {
    setenv("LAWSON_CUDNN", cudnn.c_str(), 1);
    if (!nvrtc.empty()) setenv("LAWSON_NVRTC", nvrtc.c_str(), 1);
    return load();
  });
}

TEST(Loader, OverrideIsAFileOrAFolder) {
  const std::string expected =
      kA + "/libcudnn.so.9 9.19.0 LAWSON_CUDNN; " + kA + "/libnvrtc.so.13 13.0 beside cuDNN";
  EXPECT_EQ(load_with(kA), expected);
  EXPECT_EQ(load_with(kA + "/libcudnn.so.9"), expected);
}

TEST(Loader, MissingOverrideIsNotPassedOver) {
  for (const std::string& missing : {std::string{"/nowhere/libcudnn.so.9"}, kFakes}) {
    const std::string said = load_with(missing);
    EXPECT_EQ(said.find("unavailable: "), 0U) << said;
    EXPECT_NE(said.find("LAWSON_CUDNN=" + missing), std::string::npos) << said;
  }
  const std::string said = load_with(kA, "/nowhere/libnvrtc.so.13");
  EXPECT_EQ(said.find("unavailable: LAWSON_NVRTC=/nowhere/libnvrtc.so.13"), 0U) << said;
}

TEST(Loader, OverrideThatIsNoLibrary) {
  const std::string file = ::testing::TempDir() + "no-library";
  std::ofstream{file} << "text";
  const std::string said = load_with(file);
  EXPECT_EQ(said.find("unavailable: LAWSON_CUDNN=" + file), 0U) << said;
  // A library, but not cuDNN.
  const std::string other = load_with(kA + "/libcudnn_ops.so.9");
  EXPECT_NE(other.find("is not what it seems"), std::string::npos) << other;
}

// What the dynamic loader waits for, dies of, or calls "No such file or directory".
TEST(Loader, OverrideThatIsDamaged) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path{::testing::TempDir()} / fmt::format("damaged-{}", getpid());
  fs::create_directories(folder);
  const std::string file = folder / "libcudnn.so.9";
  const auto says = [&](const std::string& part) {
    const std::string said = load_with(folder);
    EXPECT_EQ(said.find("unavailable: LAWSON_CUDNN=" + folder.string()), 0U) << said;
    EXPECT_NE(said.find(file + " " + part), std::string::npos) << said;
  };
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  says("is not a regular file");
  fs::remove(file);
  fs::create_directory(file);
  says("is not a regular file");
  fs::remove(file);
  fs::copy_file(kA + "/libcudnn.so.9", file);
  std::fstream{file, std::ios::in | std::ios::out | std::ios::binary}.seekp(18).put(8);  // MIPS
  says("is a library for another machine (ELF machine 8)");
  fs::remove(file);
  fs::copy_file(kA + "/libcudnn.so.9", file);
  for (const std::uintmax_t size : {4096U, 1000U, 100U}) {
    fs::resize_file(file, size);
    says("is truncated");
  }
  fs::resize_file(file, 0);
  says("is not a library for this machine");
  fs::remove_all(folder);
}

TEST(Loader, OldVersionNamesFileAndVersion) {
  const std::string said = load_with(kB);
  EXPECT_EQ(said.find("unavailable: "), 0U) << said;
  EXPECT_NE(said.find(kB + "/libcudnn.so.9 is cuDNN 9.1.0"), std::string::npos) << said;
}

TEST(Loader, TwoBuildsInOneProcessNameBothFiles) {
  const std::string said = in_child([] {
    if (dlopen((kB + "/libcudnn.so.9").c_str(), RTLD_NOW) == nullptr) return std::string{dlerror()};
    setenv("LAWSON_CUDNN", kA.c_str(), 1);
    return load();
  });
  EXPECT_EQ(said.find("unavailable: "), 0U) << said;
  EXPECT_NE(said.find(kA + "/libcudnn.so.9"), std::string::npos) << said;
  EXPECT_NE(said.find(kB + "/libcudnn.so.9"), std::string::npos) << said;
}

TEST(Loader, SublibraryOfAnotherBuildNamesBothFiles) {
  const std::string said = in_child([] {
    setenv("LAWSON_CUDNN", kA.c_str(), 1);
    const std::string first = load();
    if (first.find("unavailable") != std::string::npos) return first;
    if (dlopen((kB + "/libcudnn_ops.so.9").c_str(), RTLD_NOW) == nullptr) {
      return std::string{dlerror()};
    }
    return load();
  });
  EXPECT_EQ(said.find("unavailable: two cuDNN builds"), 0U) << said;
  EXPECT_NE(said.find(kA + "/libcudnn.so.9"), std::string::npos) << said;
  EXPECT_NE(said.find(kB + "/libcudnn_ops.so.9"), std::string::npos) << said;
}

TEST(Loader, LoadedLibraryComesBeforeTheSearch) {
  const std::string said = in_child([] {
    unsetenv("LAWSON_CUDNN");
    if (dlopen((kA + "/libcudnn.so.9").c_str(), RTLD_NOW) == nullptr) return std::string{dlerror()};
    return load();
  });
  EXPECT_EQ(said.find(kA + "/libcudnn.so.9 9.19.0 already loaded in this process"), 0U) << said;
}

TEST(Loader, FindsThePackagesOfTheVirtualEnvironment) {
  namespace fs = std::filesystem;
  const fs::path environment = fs::path{::testing::TempDir()} / "environment";
  const fs::path packages = environment / "lib" / "python3.11" / "site-packages" / "nvidia";
  fs::remove_all(environment);
  fs::create_directories(packages / "cudnn" / "lib");
  fs::create_directories(packages / "cu13" / "lib");
  fs::copy(kA + "/libcudnn.so.9", packages / "cudnn" / "lib");
  fs::copy(kA + "/libnvrtc.so.13", packages / "cu13" / "lib");
  const std::string said = in_child([&] {
    unsetenv("LAWSON_CUDNN");
    setenv("VIRTUAL_ENV", environment.c_str(), 1);
    return load();
  });
  EXPECT_EQ(said,
            (packages / "cudnn" / "lib" / "libcudnn.so.9").string() + " 9.19.0 $VIRTUAL_ENV; " +
                (packages / "cu13" / "lib" / "libnvrtc.so.13").string() + " 13.0 beside cuDNN");
}

TEST(Loader, AFailureIsNotRemembered) {
  const std::string said = in_child([] {
    setenv("LAWSON_CUDNN", "/nowhere", 1);
    const std::string first = load();
    setenv("LAWSON_CUDNN", kA.c_str(), 1);
    return first + " THEN " + load();
  });
  EXPECT_EQ(said.find("unavailable: LAWSON_CUDNN=/nowhere"), 0U) << said;
  EXPECT_NE(said.find("THEN " + kA), std::string::npos) << said;
}

TEST(Loader, DevicelessModeIsRefusedBesideADriver) {
  // Stands for the real driver: a file of its name.
  const std::string real = ::testing::TempDir() + "libcuda.so.1";
  std::filesystem::copy_file(NODRIVER, real, std::filesystem::copy_options::overwrite_existing);
  const std::string said = in_child([&] {
    if (dlopen(real.c_str(), RTLD_NOW) == nullptr) return std::string{dlerror()};
    const Status entered = enter_deviceless(NODRIVER);
    return entered.ok() ? std::string{"entered"} : entered.error().message;
  });
  EXPECT_NE(said.find("has the driver library"), std::string::npos) << said;
  const std::string missing = in_child([] {
    const Status entered = enter_deviceless("/nowhere/liblawson-nodriver.so");
    return entered.ok() ? std::string{"entered"} : entered.error().message;
  });
  EXPECT_NE(missing.find("/nowhere/liblawson-nodriver.so"), std::string::npos) << missing;
}

}  // namespace
}  // namespace lawson::cudnn

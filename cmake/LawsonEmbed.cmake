# cmake -DIMAGE=FILE -DNAME=steps -DOUTPUT=FILE.cpp -P LawsonEmbed.cmake
# Writes the source that defines NAME_image() of engine/cudnn/NAME_image.h; IMAGE may be empty.
set(bytes "")
set(size 0)
if(IMAGE)
  file(READ ${IMAGE} hex HEX)
  string(LENGTH "${hex}" size)
  math(EXPR size "${size} / 2")
  string(REGEX REPLACE "(................................)" "\\1\n" hex "${hex}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
endif()
if(size EQUAL 0)
  set(definition "  return {};")
else()
  set(definition "  alignas(64) static constexpr unsigned char kBytes[] = {\n${bytes}\n  };
  return kBytes;")
endif()
file(WRITE ${OUTPUT} "#include \"engine/cudnn/${NAME}_image.h\"

namespace lawson::cudnn {

std::span<const unsigned char> ${NAME}_image() {
${definition}
}

}  // namespace lawson::cudnn
")

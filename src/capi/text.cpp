#include "capi/handles.h"

extern "C" {

const char* lawson_text_data(const lawson_text* text) {
  return text == nullptr ? "" : text->text.c_str();
}

size_t lawson_text_size(const lawson_text* text) {
  return text == nullptr ? 0 : text->text.size();
}

void lawson_text_destroy(lawson_text* text) {
  delete text;
}

}  // extern "C"

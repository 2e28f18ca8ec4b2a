// fmt, compiled once for the whole library: header-only use costs every other translation unit
// more than two seconds. These are the definitions behind the extern templates of fmt/format.h.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
namespace detail {

template FMT_API auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template FMT_API auto decimal_point_impl(locale_ref) -> char;

}  // namespace detail
FMT_END_NAMESPACE

// How Python calls a kernel: with one struct, all of whose fields take eight bytes.
//
//   TH_CALL(Call, const void *q, *k; float* state; int64_t num_tokens, is_bf16; double scale;);
//   TH_EXPORT_CALL(name, Call) { ... call->q ...; return true; }
//
// Tensors come first, then integers (flags too), then floating point numbers. A struct carries its
// own declaration as text, and native/call.py holds what it packs to that when it loads a library.
// A function returns false, having written nothing, when an index is out of range.
//
// TH_EXPORT_CALL_OF_ROWS(name, Call, Row) is for a call that is followed by Rows in memory; these
// are `rows_of<Row>(*call)`, and a field of the call says how many there are.
#pragma once

#include <cstdint>

#include "export.h"

namespace th {

// Mirrored in call.py, as the one struct that nothing else can check.
struct Layout {
  const char* fields;
  int64_t bytes;
  const char* row_fields;
  int64_t row_bytes;
};

template <typename Row, typename Call>
const Row* rows_of(const Call& call) {
  return reinterpret_cast<const Row*>(&call + 1);
}

}  // namespace th

#define TH_CALL(Name, ...)                         \
  struct Name {                                    \
    static constexpr char FIELDS[] = #__VA_ARGS__; \
    __VA_ARGS__                                    \
  }

#define TH_EXPORT_LAYOUT(name, ...)                             \
  extern "C" TH_EXPORT const th::Layout* name##_layout() {      \
    static const th::Layout layout{__VA_ARGS__};                \
    return &layout;                                             \
  }

#define TH_EXPORT_CALL(name, Call)                      \
  TH_EXPORT_LAYOUT(name, Call::FIELDS, sizeof(Call), "", 0) \
  extern "C" TH_EXPORT bool name(const Call* call)

#define TH_EXPORT_CALL_OF_ROWS(name, Call, Row)                                \
  TH_EXPORT_LAYOUT(name, Call::FIELDS, sizeof(Call), Row::FIELDS, sizeof(Row)) \
  extern "C" TH_EXPORT bool name(const Call* call)

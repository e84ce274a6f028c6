// A function that a library exports:  extern "C" TH_EXPORT ret name(...).  All others are hidden.
#pragma once

#define TH_EXPORT __attribute__((visibility("default")))

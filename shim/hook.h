// How an interposed function is declared: under a name of its own, so that the C library's headers
// (their inline bodies, fortified forms and attributes) do not interfere.
#pragma once

#define HOOK(name) __asm__(#name) __attribute__((visibility("default")))
// A second exported name for a function hooked under `target` in the same file.
#define HOOK_ALIAS(name, target) \
  __asm__(#name) __attribute__((visibility("default"), alias(#target)))

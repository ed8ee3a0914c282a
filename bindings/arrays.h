// Arrays of one dimension, as arguments and as results.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <string>

#include "stoker/error.h"

template <typename T>
using Array = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T>
std::span<T> span(const Array<T>& array) {
  return {array.data(), array.size()};
}

/// An array in memory of `new T[count]`, which belongs to it from here on.
template <typename T>
nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>> own(T* memory, std::size_t count) {
  const nanobind::capsule owner(memory,
                                [](void* block) noexcept { delete[] static_cast<T*>(block); });
  return {memory, {count}, owner};
}

inline void check_lengths(std::size_t given, std::size_t wanted) {
  if (given != wanted) {
    throw stoker::ConfigError("arrays of " + std::to_string(given) + " and " +
                              std::to_string(wanted) + " elements: give equal lengths");
  }
}

// Arguments of Arena.replay_once_each: translates arrays and callables, decides nothing.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "stoker/arena.h"
#include "stoker/error.h"

template <typename T>
using ById = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

/// Who may stand in for whom; holds what the callables return as long as it is needed.
class OnceEachArguments {
 public:
  using Ids = ById<const std::uint32_t>;
  using Places = std::optional<ById<const std::uint8_t>>;
  using Packaged = std::optional<ById<std::uint8_t>>;

  OnceEachArguments(const ById<std::uint32_t>& served, const ById<std::uint32_t>& turns,
                    std::uint32_t stamp, const Places& places, std::uint8_t place)
      : count_(served.size()) {
    check(turns, "turns");
    once_.served = {served.data(), served.size()};
    once_.turns = {turns.data(), turns.size()};
    once_.stamp = stamp;
    once_.places = data(places, "places");
    once_.place = place;
  }

  void search_by(const Ids& candidates, nanobind::callable search) {
    held_ = candidates;
    once_.candidates = {candidates.data(), candidates.size()};
    once_.search = [this, search](std::size_t begun) -> stoker::Arena::Ids {
      const nanobind::gil_scoped_acquire locked;
      held_ = nanobind::cast<Ids>(search(begun));
      return {held_->data(), held_->size()};
    };
  }

  void pack_by(const Packaged& packaged, std::int64_t room, const Ids& gone,
               nanobind::object make_room) {
    if (make_room.is_none()) return;
    if (!packaged || once_.places == nullptr) {
      throw stoker::ConfigError("packages need arrays packaged and places");
    }
    once_.packaged = data(packaged, "packaged");
    once_.room = room;
    once_.gone.assign(gone.data(), gone.data() + gone.size());
    once_.make_room = [make_room](std::vector<std::uint32_t>& gone) {
      const nanobind::gil_scoped_acquire locked;
      using Gone = nanobind::ndarray<nanobind::numpy, std::uint32_t, nanobind::ndim<1>>;
      const Gone array(gone.data(), {gone.size()}, nanobind::handle());
      return nanobind::cast<std::int64_t>(
          make_room(nanobind::cast(array, nanobind::rv_policy::copy)));
    };
  }

  stoker::Arena::OnceEach& get() { return once_; }
  std::size_t count() const { return count_; }

 private:
  template <typename T>
  void check(const ById<T>& array, const char* name) const {
    if (array.size() == count_) return;
    throw stoker::ConfigError(std::string(name) + " has " + std::to_string(array.size()) +
                              " elements: give " + std::to_string(count_));
  }
  template <typename T>
  T* data(const std::optional<ById<T>>& array, const char* name) const {
    if (!array) return nullptr;
    check(*array, name);
    return array->data();
  }

  std::size_t count_;
  stoker::Arena::OnceEach once_;
  std::optional<Ids> held_;
};

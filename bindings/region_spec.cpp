#include "region_spec.h"

#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "stoker/error.h"

namespace nb = nanobind;

namespace {

template <typename Rule>
struct Named {
  const char* name;
  Rule rule;
};

constexpr Named<stoker::Order> kOrders[] = {
    {"key", stoker::Order::kKey},
    {"recency", stoker::Order::kRecency},
    {"frequency", stoker::Order::kFrequency},
    {"insertion", stoker::Order::kInsertion},
};
constexpr Named<stoker::Admission> kAdmissions[] = {
    {"always", stoker::Admission::kAlways},
    {"beats_victims", stoker::Admission::kBeatsVictims},
    {"while_room", stoker::Admission::kWhileRoom},
};
constexpr Named<stoker::Pop> kPops[] = {
    {"evict", stoker::Pop::kEvict},     {"random", stoker::Pop::kRandom},
    {"sieve", stoker::Pop::kSieve},     {"second_chance", stoker::Pop::kSecondChance},
    {"promote", stoker::Pop::kPromote},
};

// The rule that a region has under `field`, by its name.
template <typename Rule, std::size_t kCount>
Rule rule_of(const nb::dict& rules, const char* field, const Named<Rule> (&known)[kCount]) {
  const auto name = nb::cast<std::string>(rules[field]);
  for (const Named<Rule>& named : known) {
    if (name == named.name) return named.rule;
  }
  throw stoker::ConfigError(std::string(field) + "=\"" + name + "\" is not known");
}

}  // namespace

stoker::RegionSpec region_spec(const nb::dict& rules) {
  stoker::RegionSpec spec;
  spec.name = nb::cast<std::string>(rules["name"]);
  spec.budget = nb::cast<std::uint64_t>(rules["budget"]);
  spec.order = rule_of(rules, "order", kOrders);
  spec.admission = rule_of(rules, "admission", kAdmissions);
  spec.pop = rule_of(rules, "pop", kPops);
  spec.visits = nb::cast<std::uint8_t>(rules["visits"]);
  spec.ties = nb::cast<bool>(rules["ties"]);
  spec.strict = nb::cast<bool>(rules["strict"]);
  spec.holds_bytes = nb::cast<bool>(rules["holds_bytes"]);
  spec.promote_to = nb::cast<std::string>(rules["promote_to"]);
  spec.ghost = nb::cast<std::string>(rules["ghost"]);
  return spec;
}

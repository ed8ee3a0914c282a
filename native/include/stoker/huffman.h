// The Huffman codes of a JPEG's only scan, as ITU-T T.81 (F.2.2) defines them for baseline files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace stoker {

/// What the next bits of a scan mean: often two values at once.
struct HuffmanTable {
  static constexpr unsigned kBits = 10;  // larger tables leave the nearest cache to nothing else

  /// A code, the bits of the value behind it, and by how much both lead on in a block.
  struct Step {
    std::uint8_t code;  // 0: there is no such code
    std::uint8_t size;
    std::uint8_t skip;
  };
  /// The values that lie within kBits bits, one or two; of one, the second is the same.
  struct Entry {
    std::uint8_t bits;        // 0: not even one does
    std::uint8_t first_bits;  // if so, those of the code, or kBits + 1 where it is longer, or none
    std::uint8_t first_skip;
    std::uint8_t skip;  // of all
    std::int16_t first;
    std::int16_t second;
  };

  /// `counts[l]` codes have l bits, 1 to 16, and `symbols` are theirs in turn: as libjpeg keeps
  /// them, which has checked both. `symbols` must stay.
  void fill(const std::uint8_t* counts, const std::uint8_t* symbols, bool is_dc);
  /// Returns the step that `bits` begin with, whose `entry` has no value.
  Step step_of(const Entry& entry, std::uint64_t bits) const;

  std::array<Entry, 1u << kBits> entries;

 private:
  Step step(unsigned code, unsigned symbol) const;
  void pair_up();

  std::array<std::uint32_t, 17> limits_;  // behind the last code of a length, were it 16 bits long
  std::array<std::int32_t, 17> offsets_;  // from a code to its symbol
  const std::uint8_t* symbols_;
  bool is_dc_;
};

/// Reads the blocks of a scan without restart markers, one MCU after the other.
class ScanReader {
 public:
  using Coefficients = std::int16_t[64];

  /// A block of each MCU.
  struct Block {
    const HuffmanTable* dc;
    const HuffmanTable* ac;
    std::size_t colour;   // 0 to 3
    bool is_mean_enough;  // of the coefficients only the first is needed
  };
  /// Bits that were taken from the data and are not used yet, from the highest on.
  struct Bits {
    std::uint64_t value;
    unsigned count;
    unsigned invented;  // of them behind the end of the data, all in all
    const std::uint8_t* next;
    const std::uint8_t* end;
  };

  /// `data` begins with the first code and may end anywhere behind the last.
  void open(std::span<const std::uint8_t> data);
  /// Adds a block to each MCU, which has ten at most.
  void add(const Block& block) { blocks_[count_++] = block; }
  /// Reads an MCU into `blocks`, which are all 0, or over it where that is null; false if the data
  /// is damaged.
  bool read(Coefficients* const* blocks);
  /// What is left of the data.
  std::span<const std::uint8_t> rest() const { return {bits_.next, bits_.end}; }

 private:
  Bits bits_{};
  std::size_t count_ = 0;
  std::array<Block, 10> blocks_;
  std::array<std::uint32_t, 4> means_{};  // the last of each colour; damaged data makes them wrap
};

}  // namespace stoker

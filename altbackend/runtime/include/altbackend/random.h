// Counter-based random numbers: Philox4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
// Pure functions of (seed, index), so that a loop over indices vectorises and any order gives the same values.
#pragma once
#include "trig.h"

namespace alt {

struct Philox4 {
  uint32_t x, y, z, w;
};

namespace detail {

ALT_FN Philox4 philox_round(Philox4 c, uint32_t key_x, uint32_t key_y) {
  const uint64_t a = uint64_t(c.x) * 0xD2511F53u, b = uint64_t(c.z) * 0xCD9E8D57u;
  return {uint32_t(b >> 32) ^ c.y ^ key_x, uint32_t(b), uint32_t(a >> 32) ^ c.w ^ key_y, uint32_t(a)};
}
ALT_FN Philox4 philox_block(Philox4 c, uint32_t key_x, uint32_t key_y) {
#define ALT_ROUND(i) c = philox_round(c, key_x + i##u * 0x9E3779B9u, key_y + i##u * 0xBB67AE85u);
  ALT_ROUND(0) ALT_ROUND(1) ALT_ROUND(2) ALT_ROUND(3) ALT_ROUND(4)
  ALT_ROUND(5) ALT_ROUND(6) ALT_ROUND(7) ALT_ROUND(8) ALT_ROUND(9)
#undef ALT_ROUND
  return c;
}

}  // namespace detail

// The block at counter (index, offset) under the key `seed`.
ALT_FN Philox4 philox(uint64_t seed, uint64_t offset, uint64_t index) {
  const Philox4 counter = {uint32_t(index), uint32_t(index >> 32), uint32_t(offset), uint32_t(offset >> 32)};
  return detail::philox_block(counter, uint32_t(seed), uint32_t(seed >> 32));
}

// Uniform in [0, 1), 24 bits.
ALT_FN float rand_uniform(uint64_t seed, uint64_t index) {
  return float(int32_t(alt::philox(seed, 0, index).x >> 8)) * 0x1p-24f;
}

// Standard normal (Box and Muller, 1958) from 32 bits of radius, so up to 6.6 deviations, and 24 bits of angle.
ALT_FN float rand_normal(uint64_t seed, uint64_t index) {
  const Philox4 bits = alt::philox(seed, 0, index);
  const float low = detail::fma(float(int32_t(bits.x & 255)), 0x1p-32f, 0x1p-33f);
  const float u = detail::fma(float(int32_t(bits.x >> 8)), 0x1p-24f, low);
  const float turns = float(int32_t(bits.y >> 8)) * 0x1p-22f;
  const detail::Rounded<float> quadrant = detail::round_to_int(turns);
  const float cosine = detail::sin_of(turns - quadrant.value, quadrant.integer + 1);
  return alt::sqrt(-2.0f * alt::log(u)) * cosine;
}

// The operators of kernels, of (seed, counter) in int64. Four neighbours are uniform from the words of one block;
// a normal number takes 24 bits each of its own block's first and second word, an integer both.
ALT_FN float philox_uniform(int64_t seed, int64_t counter) {
  const Philox4 block = alt::philox(uint64_t(seed), 0, uint64_t(counter) >> 2);
  const uint32_t low = counter & 1 ? block.y : block.x, high = counter & 1 ? block.w : block.z;
  return float(int32_t((counter & 2 ? high : low) >> 8)) * 0x1p-24f;
}
ALT_FN float philox_radius(int64_t seed, int64_t counter) {
  return alt::rand_uniform(uint64_t(seed), uint64_t(counter));
}
ALT_FN float philox_turn(int64_t seed, int64_t counter) {
  return float(int32_t(alt::philox(uint64_t(seed), 0, uint64_t(counter)).y >> 8)) * 0x1p-24f;
}
ALT_FN int64_t philox_bits(int64_t seed, int64_t counter) {
  const Philox4 bits = alt::philox(uint64_t(seed), 0, uint64_t(counter));
  return int64_t((uint64_t(bits.y) << 32) | bits.x);
}

// Uniform integer in [low, high), from 64 bits by remainder, as torch; low for an empty range. Scalar.
ALT_FN int64_t randint64(uint64_t seed, uint64_t index, int64_t low, int64_t high) {
  const Philox4 bits = alt::philox(seed, 0, index);
  const uint64_t value = (uint64_t(bits.y) << 32) | bits.x, range = uint64_t(high) - uint64_t(low);
  return int64_t(uint64_t(low) + (range == 0 ? 0 : value % range));
}

}  // namespace alt

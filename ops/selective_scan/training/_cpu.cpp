// Backward of the selective scan on a CPU. A thread takes a block of channels, and of each sequence
// walks the tokens twice: forwards for the states at the starts of chunks, then back from the last
// chunk. There it recomputes the chunk's states, and takes their gradients from its last row on.
//
// Lanes are channels, so that sums over states need no shuffles. What a block's channels add to the
// gradients of B and C is summed over blocks at last. All sums have a fixed order, whatever the
// number of threads; those over tokens are float32 within a chunk, and double over chunks.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "aligned_floats.h"
#include "call.h"
#include "denormals.h"
#include "offsets.h"
#include "power_of_2.h"
#include "simd.h"

namespace th::selective {

TH_CALL(BackwardCall,
  const void *x, *dt;                    // [T, C] in the op's dtype
  const float* A;                        // [C, N]
  const void *B, *C;                     // [T, G, N]
  const float* D;                        // [C] or null
  const void* z;                         // [T, C] or null
  const float* dt_bias;                  // [C] or null
  const int32_t* cu_seqlens;
  const float* initial_state;            // [S, C, N], or null: from zeros
  const void* dout;                      // [T, C]
  const float* dfinal_state;             // as initial_state
  void *dx, *ddt;                        // contiguous, and null where there is no such argument
  float* dA;
  void *dB, *dC;
  float* dD;
  void* dz;
  float *ddt_bias, *dinitial_state;
  int64_t num_tokens, num_seqs, channels, num_groups, state_dim;  // T, S, C, G, N
  int64_t x_stride, dt_stride, B_stride, C_stride, z_stride, dout_stride;
  int64_t is_bf16, num_threads;
);

constexpr int64_t WIDTH = 64;  // channels of a block
constexpr int64_t CHUNK = 8;   // tokens, whose states and decays stay in a cache
constexpr int PANEL = REGISTERS / 8;  // registers of channels that are walked back together
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// The buffers of a thread. Of a block's channels those past its last one are 0.
struct Scratch {
  float *rates, *dA, *carry;          // [N, WIDTH]: of powers of 2; sums of a chunk; of states
  float *states, *decays;             // [CHUNK + 1, N, WIDTH] before the rows; [CHUNK, N, WIDTH]
  float *B, *C;                       // [CHUNK, N]
  float *sums_B, *sums_C;             // [N, REGISTER_LANES]
  float *step, *slope, *added, *dy;   // [CHUNK, WIDTH]; added: inputs times steps
  float *y, *dadded, *by_rate;        // [CHUNK, WIDTH]; y: before D and the gate
  float *D, *bias;                    // [WIDTH]
  float* kept;                        // [chunks, N, WIDTH]

  static int64_t num_floats(int64_t N, int64_t chunks) {
    return (4 + 2 * CHUNK + chunks) * N * WIDTH + 2 * N * (round_up(CHUNK) + LANES) +
           (7 * CHUNK + 2) * WIDTH;
  }

  Scratch(float* p, int64_t N) {
    const auto take = [&p](int64_t n) { return (p += n) - n; };
    for (float** states : {&rates, &dA, &carry}) *states = take(N * WIDTH);
    states = take((CHUNK + 1) * N * WIDTH), decays = take(CHUNK * N * WIDTH);
    for (float** rows : {&step, &slope, &added, &dy, &y, &dadded, &by_rate})
      *rows = take(CHUNK * WIDTH);
    D = take(WIDTH), bias = take(WIDTH);
    for (float** sums : {&sums_B, &sums_C}) *sums = take(N * LANES);
    for (float** rows : {&B, &C}) *rows = take(N * round_up(CHUNK));
    kept = p;
  }

 private:
  static constexpr int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
};

// Channels of one group, in all sequences, and what is summed over these.
template <typename T>
struct Block {
  const BackwardCall& call;
  int64_t channel, size, group;
  float *shares_B, *shares_C;  // [T, N]
  std::vector<double> dA, dD, dbias;

  Block(const BackwardCall& call, int64_t number, float* shares_B, float* shares_C)
      : call(call),
        shares_B(shares_B),
        shares_C(shares_C),
        dA(WIDTH * call.state_dim),
        dD(WIDTH),
        dbias(WIDTH) {
    const int64_t of_group = call.channels / call.num_groups;
    const int64_t blocks = (of_group + WIDTH - 1) / WIDTH, first = number % blocks * WIDTH;
    group = number / blocks, channel = group * of_group + first;
    size = std::min(WIDTH, of_group - first);
  }

  const T* row(const void* rows, int64_t stride, int64_t t) const {
    return (const T*)rows + t * stride + channel;
  }
  T* out(void* rows, int64_t t) const { return (T*)rows + t * call.channels + channel; }
  // Element i of [n, N, WIDTH] for each of a channel's own, which lie side by side in `states`.
  template <typename F, typename Body>
  void for_states(F* states, int64_t seq, Body body) const {
    for (int64_t c = 0; c < size; ++c)
      for (int64_t k = 0; k < call.state_dim; ++k)
        body(states[(seq * call.channels + channel + c) * call.state_dim + k], k * WIDTH + c);
  }
  void load_states(const float* states, int64_t seq, float* to) const {
    std::fill(to, to + call.state_dim * WIDTH, 0.0f);
    if (states) for_states(states, seq, [to](float x, int64_t i) { to[i] = x; });
  }

  void open(const Scratch& s) const {
    for (float* rows : {s.step, s.added, s.dy}) std::fill(rows, rows + CHUNK * WIDTH, 0.0f);
    load_states(call.A, 0, s.rates);
    for (int64_t i = 0; i < call.state_dim * WIDTH; ++i) s.rates[i] *= LOG2_E;
    for (int64_t c = 0; c < WIDTH; ++c) {
      s.D[c] = call.D && c < size ? call.D[channel + c] : 0.0f;
      s.bias[c] = call.dt_bias && c < size ? call.dt_bias[channel + c] : 0.0f;
    }
  }
  void close() const {
    for_states(call.dA, 0, [this](float& x, int64_t i) { x = float(dA[i]); });
    if (call.dD) std::copy_n(dD.begin(), size, call.dD + channel);
    if (call.ddt_bias) std::copy_n(dbias.begin(), size, call.ddt_bias + channel);
  }
};

// Rows of tokens lie too far apart for a processor to foresee the next one.
template <typename T>
TH_INLINE void prefetch(const T* row) {
  for (int64_t i = 0; i < WIDTH; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

// Steps of `rows` tokens from `first` on, and what they add; with `back`, what gradients need besides.
template <typename T>
void prepare(const Block<T>& block, const Scratch& s, int64_t first, int64_t rows, bool back) {
  const BackwardCall& call = block.call;
  const int64_t N = call.state_dim, ahead = back ? -CHUNK : CHUNK;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t t = first + i, next = std::clamp<int64_t>(t + ahead, 0, call.num_tokens - 1);
    const T *x = block.row(call.x, call.x_stride, t), *dt = block.row(call.dt, call.dt_stride, t);
    prefetch(block.row(call.x, call.x_stride, next));
    prefetch(block.row(call.dt, call.dt_stride, next));
    const T* B = (const T*)call.B + t * call.B_stride + block.group * N;
    const T* C = (const T*)call.C + t * call.C_stride + block.group * N;
    for (int64_t k = 0; k < N; ++k) {
      s.B[i * N + k] = to_float(B[k]);
      s.C[i * N + k] = to_float(C[k]);
    }
    for_lanes(block.size, [&](int64_t c, int n) TH_LAMBDA {
      const f32x16 before = load(dt + c, n) + load(s.bias + c), step = softplus(before);
      const int64_t at = i * WIDTH + c;
      store(s.step + at, step);
      store(s.added + at, step * load(x + c, n));
      if (back) store(s.slope + at, sigmoid(before));
    });
    if (!back) continue;
    const T* dout = block.row(call.dout, call.dout_stride, t);
    const T* z = call.z ? block.row(call.z, call.z_stride, t) : nullptr;
    prefetch(block.row(call.dout, call.dout_stride, next));
    if (z) prefetch(block.row(call.z, call.z_stride, next));
    for_lanes(block.size, [&](int64_t c, int n) TH_LAMBDA {
      const f32x16 dy = load(dout + c, n);
      store(s.dy + i * WIDTH + c, z ? dy * silu(load(z + c, n)) : dy);
    });
  }
}

// Advances states by some rows: in place, or keeping all of them, decays and what is read.
template <bool KEEPS>
void advance(const Scratch& s, int64_t N, int64_t rows, float* states) {
  for (int64_t c = 0; c < WIDTH; c += REGISTER_LANES)
    for (int64_t i = 0; i < rows; ++i) {
      const Register step = load_register(s.step + i * WIDTH + c);
      const Register added = load_register(s.added + i * WIDTH + c);
      const float* before = states + KEEPS * i * N * WIDTH + c;
      float* after = states + KEEPS * (i + 1) * N * WIDTH + c;
      Register y{};
#pragma GCC unroll 4
      for (int64_t k = 0; k < N; ++k) {
        const Register decay = power_of_2(load_register(s.rates + k * WIDTH + c) * step);
        const Register state =
            fma(load_register(before + k * WIDTH), decay, added * s.B[i * N + k]);
        store_register(after + k * WIDTH, state);
        if (!KEEPS) continue;
        store_register(s.decays + (i * N + k) * WIDTH + c, decay);
        y = fma(state, s.C[i * N + k] - Register{}, y);
      }
      if (KEEPS) store_register(s.y + i * WIDTH + c, y);
    }
}

// Takes the gradients of states back over row i.
inline void walk_back(const Scratch& s, int64_t N, int64_t i) {
  for (int64_t first = 0; first < WIDTH; first += PANEL * REGISTER_LANES) {
    const float *step = s.step + i * WIDTH + first, *added = s.added + i * WIDTH + first;
    const float* dy = s.dy + i * WIDTH + first;
    Register dadded[PANEL] = {}, by_rate[PANEL] = {};
    for (int64_t k = 0; k < N; ++k) {
      const Register B = s.B[i * N + k] - Register{}, C = s.C[i * N + k] - Register{};
      Register sum_B{}, sum_C{};
      if (first) {
        sum_B = load_register(s.sums_B + k * LANES);
        sum_C = load_register(s.sums_C + k * LANES);
      }
#pragma GCC unroll 4
      for (int v = 0; v < PANEL; ++v) {
        const int64_t lane = v * REGISTER_LANES, at = k * WIDTH + first + lane;
        const int64_t row = i * N * WIDTH + at;
        const Register of_y = load_register(dy + lane);
        const Register dstate = fma(of_y, C, load_register(s.carry + at));
        const Register before = dstate * load_register(s.decays + row);
        store_register(s.carry + at, before);
        const Register by_decay = before * load_register(s.states + row);
        const Register dA = load_register(s.dA + at);
        store_register(s.dA + at, fma(by_decay, load_register(step + lane), dA));
        by_rate[v] = fma(by_decay, load_register(s.rates + at), by_rate[v]);
        dadded[v] = fma(dstate, B, dadded[v]);
        sum_B = fma(dstate, load_register(added + lane), sum_B);
        sum_C = fma(load_register(s.states + row + N * WIDTH), of_y, sum_C);
      }
      store_register(s.sums_B + k * LANES, sum_B);
      store_register(s.sums_C + k * LANES, sum_C);
    }
    for (int v = 0; v < PANEL; ++v) {
      const int64_t at = i * WIDTH + first + v * REGISTER_LANES;
      store_register(s.dadded + at, dadded[v]);
      store_register(s.by_rate + at, by_rate[v]);
    }
  }
}

// Gradients of the inputs of some tokens, and their sums.
template <typename T>
void finish(Block<T>& block, const Scratch& s, int64_t first, int64_t rows) {
  const BackwardCall& call = block.call;
  for_lanes(block.size, [&](int64_t c, int n) TH_LAMBDA {
    const f32x16 D = load(s.D + c);
    f32x16 dD{}, dbias{};
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t t = first + i, at = i * WIDTH + c;
      const f32x16 x = load(block.row(call.x, call.x_stride, t) + c, n), dy = load(s.dy + at);
      const f32x16 dadded = load(s.dadded + at);
      const f32x16 dstep = fma(dadded, x, load(s.by_rate + at) * LN_2);
      const f32x16 ddt = dstep * load(s.slope + at);
      store(block.out(call.dx, t) + c, fma(dadded, load(s.step + at), D * dy), n);
      store(block.out(call.ddt, t) + c, ddt, n);
      dD = fma(dy, x, dD);
      dbias += ddt;
      if (!call.z) continue;
      const f32x16 z = load(block.row(call.z, call.z_stride, t) + c, n), gate = sigmoid(z);
      const f32x16 dout = load(block.row(call.dout, call.dout_stride, t) + c, n);
      const f32x16 y = fma(D, x, load(s.y + at));
      store(block.out(call.dz, t) + c, dout * y * (gate * fma(z, 1.0f - gate, splat(1.0f))), n);
    }
    for (int lane = 0; lane < n; ++lane) {
      block.dD[c + lane] += dD[lane];
      block.dbias[c + lane] += dbias[lane];
    }
  });
  for (int64_t i = 0; i < call.state_dim * WIDTH; ++i) block.dA[i] += s.dA[i];
}

template <typename T>
void backward(Block<T>& block, const Scratch& s, int64_t n) {
  const BackwardCall& call = block.call;
  const int64_t N = call.state_dim, size = N * WIDTH;
  const int64_t begin = call.cu_seqlens[n], end = call.cu_seqlens[n + 1];
  const int64_t num_chunks = (end - begin + CHUNK - 1) / CHUNK;
  block.load_states(call.initial_state, n, s.kept);
  for (int64_t chunk = 0; chunk + 1 < num_chunks; ++chunk) {
    float* states = s.kept + (chunk + 1) * size;
    std::memcpy(states, states - size, size * sizeof(float));
    prepare(block, s, begin + chunk * CHUNK, CHUNK, false);
    advance<false>(s, N, CHUNK, states);
  }
  block.load_states(call.dfinal_state, n, s.carry);
  for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) {
    const int64_t first = begin + chunk * CHUNK, rows = std::min(CHUNK, end - first);
    prepare(block, s, first, rows, true);
    std::memcpy(s.states, s.kept + chunk * size, size * sizeof(float));
    std::fill(s.dA, s.dA + size, 0.0f);
    advance<true>(s, N, rows, s.states);
    for (int64_t i = rows - 1; i >= 0; --i) {
      walk_back(s, N, i);
      for (int64_t k = 0; k < N; ++k) {
        const int64_t at = (first + i) * N + k;
        block.shares_B[at] = sum(load_register(s.sums_B + k * LANES));
        block.shares_C[at] = sum(load_register(s.sums_C + k * LANES));
      }
    }
    finish(block, s, first, rows);
  }
  if (call.dinitial_state)
    block.for_states(call.dinitial_state, n, [&s](float& x, int64_t i) { x = s.carry[i]; });
}

// Sums the shares [blocks, T, N] of a group's blocks in its gradients of B or C; 0 for padding.
template <typename T>
void store_shared(const BackwardCall& call, int64_t blocks, const float* shares, void* to) {
  const int64_t N = call.state_dim, G = call.num_groups, end = call.cu_seqlens[call.num_seqs];
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.num_tokens * G; ++row) {
    const int64_t t = row / G, first = row % G * blocks;
    for_lanes(N, [&](int64_t k, int n) TH_LAMBDA {
      f32x16 sum{};
      if (t < end)
        for (int64_t block = first; block < first + blocks; ++block)
          sum += load(shares + (block * call.num_tokens + t) * N + k, n);
      store((T*)to + row * N + k, sum, n);
    });
  }
}

template <typename T>
void backward(const BackwardCall& call) {
  const int64_t N = call.state_dim, T_N = call.num_tokens * N;
  const int64_t blocks = (call.channels / call.num_groups + WIDTH - 1) / WIDTH;
  const int64_t num_blocks = blocks * call.num_groups, end = call.cu_seqlens[call.num_seqs];
  for (void* rows : {call.dx, call.ddt, call.dz})
    if (rows)
      std::memset((T*)rows + end * call.channels, 0,
                  (call.num_tokens - end) * call.channels * sizeof(T));
  int64_t longest = 1;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    longest = std::max<int64_t>(longest, call.cu_seqlens[n + 1] - call.cu_seqlens[n]);
  AlignedFloats shares(2 * num_blocks * T_N);
#pragma omp parallel num_threads(call.num_threads)
  {
    const DenormalsAreZero denormals;
    const int64_t size = Scratch::num_floats(N, (longest + CHUNK - 1) / CHUNK);
    AlignedFloats memory(size);
    std::fill(memory.data(), memory.data() + size, 0.0f);
    const Scratch s(memory.data(), N);
#pragma omp for schedule(dynamic, 1)
    for (int64_t number = 0; number < num_blocks; ++number) {
      float* share = shares.data() + number * T_N;
      Block<T> block(call, number, share, share + num_blocks * T_N);
      block.open(s);
      for (int64_t n = 0; n < call.num_seqs; ++n) backward(block, s, n);
      block.close();
    }
    store_shared<T>(call, blocks, shares.data(), call.dB);
    store_shared<T>(call, blocks, shares.data() + num_blocks * T_N, call.dC);
  }
}

}  // namespace th::selective

TH_EXPORT_CALL(selective_scan_backward, th::selective::BackwardCall) {
  if (!th::offsets_are_valid(*call)) return false;
  call->is_bf16 ? th::selective::backward<th::bf16>(*call) : th::selective::backward<float>(*call);
  return true;
}

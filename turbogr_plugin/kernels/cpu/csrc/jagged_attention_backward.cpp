// Backward: a unit owns a block of keys of one segment and a group of heads, and goes over tiles of queries.
//
// All of it works on the transposed scores, so that no tile of their size is ever transposed: P^T and dS^T are A
// operands of dV and dK as they stand, and dS^T is a B operand of dQ^T. Five products per tile and head, the fewest
// there can be:
//
//     S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ^T = K^T dS^T
//
// dQ is added by the blocks of a row in their order (streams.h), so it needs no atomics and no second pass over the
// scores. scale and alpha multiply what is written, never the tiles.
#include "jagged_attention.h"
#include "key_blocks.h"
#include "table_gradients.h"

namespace turbogr::hstu {
namespace {

// What becomes of a tile of dS before it is multiplied: table gradients need it in float32, summed over the heads.
enum class Sum { kNone, kStore, kAdd };

// P and dS of R keys by n vectors of queries, from S and dP: d SiLU(x) = g + x g (1 - g) with g the sigmoid.
// `pairs` gets dS in pairs of rows where it is a B operand of bf16.
template <int n, bool HasBias, bool Masked, Sum sum, class C>
void differentiate(int64_t R, const float* S, const float* dP, const float* bias, C* P, C* dS, C* pairs, float* sums,
                   float alpha, const LaneMask& mask) {
  const V a(alpha), one(1.f);
  for (int64_t r = 0; r < R; r++) {
    V x[n], y[n];
    for (int c = 0; c < n; c++) {
      const int64_t o = r * kLanes + c * V::size();
      V s = V::loadu(S + o);
      if constexpr (HasBias)
        s = at::vec::fmadd(s, a, V::loadu(bias + o));
      else
        s = s * a;
      const V g = sigmoid<kLow<C>>(s);
      x[c] = s * g;
      y[c] = V::loadu(dP + o) * at::vec::fmadd(x[c], one - g, g);
    }
    if constexpr (Masked)
      for (int c = 0; c < n; c++) {
        const V allowed = mask(r, c * V::size());
        x[c] = x[c] & allowed;
        y[c] = y[c] & allowed;
      }
    store_row(P + r * kLanes, x, n);
    store_row(dS + r * kLanes, y, n);
    if constexpr (sum != Sum::kNone)
      for (int c = 0; c < n; c++) {
        float* to = sums + r * kLanes + c * V::size();
        (sum == Sum::kStore ? y[c] : V::loadu(to) + y[c]).store(to);
      }
    if constexpr (kLow<C>)
      if (r % 2 == 1) interleave(dS + (r - 1) * kLanes, dS + r * kLanes, pairs + (r - 1) * kLanes, n * V::size());
  }
}

struct Sizes {
  int64_t block, group, D, Dk, E, Ek, longest;
  bool timed, biased, sums;
  int64_t time_floats, position_floats;  // of a thread's own table gradients
};

template <class C>
struct Buffers {
  C *K, *Kt, *V_, *Q, *Qt, *G, *Gt, *P, *dS, *pairs;
  float *dK, *dV, *S, *dP, *sums, *dQt, *bias, *time_gradient, *position_gradient;
  BucketTile tile;
  int64_t *row_times, *lane_times;
  SegmentReach reach;
  LaneMask mask;

  Buffers(Cutter& cut, const Sizes& s) {
    K = cut.take<C>(s.group * s.block * s.Dk);
    Kt = cut.take<C>(s.group * s.block * s.Dk);
    V_ = cut.take<C>(s.group * s.block * s.Ek);
    dK = cut.take<float>(s.group * s.block * s.D);
    dV = cut.take<float>(s.group * s.block * s.E);
    Q = cut.take<C>(kLanes * s.D);
    Qt = cut.take<C>(kLanes * s.Dk);
    G = cut.take<C>(kLanes * s.E);
    Gt = cut.take<C>(kLanes * s.Ek);
    S = cut.take<float>(s.block * kLanes);
    dP = cut.take<float>(s.block * kLanes);
    P = kLow<C> ? cut.take<C>(s.block * kLanes) : reinterpret_cast<C*>(S);  // float32 works in place
    dS = kLow<C> ? cut.take<C>(s.block * kLanes) : reinterpret_cast<C*>(dP);
    pairs = cut.take<C>(kLow<C> ? s.block * kLanes : 0);
    sums = cut.take<float>(s.sums ? s.block * kLanes : 0);
    dQt = cut.take<float>(round_up(s.D, 16) * kLanes);
    bias = cut.take<float>(s.biased ? s.block * kLanes : 0);
    tile.buckets = cut.take<int32_t>(s.timed ? s.block * kLanes : 0);
    tile.uniform = cut.take<uint8_t>(s.timed ? s.block : 0);
    row_times = cut.take<int64_t>(s.timed ? s.block : 0);
    lane_times = cut.take<int64_t>(kLanes);
    time_gradient = cut.take<float>(s.time_floats);
    position_gradient = cut.take<float>(s.position_floats);
    reach = SegmentReach(cut, s.longest);
  }
};

template <class In, class C>
struct Backward {
  const Layout& layout;
  const Bias& bias;
  KeyBlocks& blocks;
  TableGradients& tables;
  Operand<const In> q, k, v, grad;
  float* dq;  // [T, H, D], float32
  In *dk, *dv;
  float alpha, scale;
  Sizes sizes;

  void unit(Buffers<C>& w, Stream& stream, int64_t number) const {
    const Segment& segment = layout.segments[stream.segment];
    const int64_t L = segment.length, j0 = number * sizes.block, M = std::min(sizes.block, L - j0),
                  Mp = round_up(M, 16), heads = std::min(sizes.group, layout.H - stream.head);
    fetch_ahead(stream, segment, j0);
    for (int64_t g = 0; g < heads; g++) {
      const int64_t h = stream.head + g, at = g * sizes.block;
      pack_rows(k.row(segment.begin + j0, h), k.token, w.K + at * sizes.Dk, M, sizes.D, sizes.Dk, Mp);
      pack_rows(v.row(segment.begin + j0, h), v.token, w.V_ + at * sizes.Ek, M, sizes.E, sizes.Ek, Mp);
      pack_turned(w.K + at * sizes.Dk, sizes.Dk, w.Kt + at * sizes.Dk, sizes.block, sizes.D, Mp);
      std::fill_n(w.dK + at * sizes.D, Mp * sizes.D, 0.f);
      std::fill_n(w.dV + at * sizes.E, Mp * sizes.E, 0.f);
    }
    if (sizes.timed)
      for (int64_t r = 0; r < Mp; r++) w.row_times[r] = bias.key_times[segment.begin + std::min(j0 + r, L - 1)];
    tables.clear(stream, number, w.time_gradient, w.position_gradient);
    blocks.for_query_tiles(
        w.reach, stream, number, M,
        [&](int64_t i0, int64_t N, const TileRows& rows, Turn& turn) {
          tile(w, stream, segment, heads, j0, i0, N, rows, turn);
        },
        [&](int64_t i0, int64_t N) {
          for (int64_t c = i0; c < i0 + N; c++)
            std::fill_n(dq + ((segment.begin + c) * layout.H + stream.head) * sizes.D, heads * sizes.D, 0.f);
        });
    if (segment.end_row > segment.first_row + 1) {
      bool finite = true;
      for (int64_t g = 0, at = 0; g < heads; g++, at += sizes.block)
        finite &= all_finite(w.dK + at * sizes.D, M * sizes.D) && all_finite(w.dV + at * sizes.E, M * sizes.E);
      for (int64_t r = 0; r < M; r++)
        finite &= all_finite(dq + ((segment.begin + r) * layout.H + stream.head) * sizes.D, heads * sizes.D);
      if (!finite) layout.spoiled = true;
    }
    for (int64_t g = 0; g < heads; g++)
      for (int64_t r = 0; r < M; r++) {
        const int64_t at = (segment.begin + j0 + r) * layout.H + stream.head + g;
        scale_row(w.dK + (g * sizes.block + r) * sizes.D, alpha * scale, dk + at * sizes.D, sizes.D);
        scale_row(w.dV + (g * sizes.block + r) * sizes.E, scale, dv + at * sizes.E, sizes.E);
      }
    if (sizes.sums) tables.add(stream, number, w.time_gradient, w.position_gradient);
  }

  // Rows that are about to be read: the first tile of queries and, as units of short rows are over before a fetch
  // inside them helps, the keys of the stream after this one.
  void fetch_ahead(const Stream& stream, const Segment& segment, int64_t j0) const {
    const int64_t n = std::min(kLanes, segment.length - j0);
    prefetch_rows(q.row(segment.begin + j0, stream.head), q.token, n, sizes.D);
    prefetch_rows(grad.row(segment.begin + j0, stream.head), grad.token, n, sizes.E);
    const Stream* next = segment.length <= kShort ? blocks.streams.upcoming() : nullptr;
    if (next == nullptr) return;
    const Segment& other = layout.segments[next->segment];
    for (int64_t h = next->head; h < std::min(next->head + sizes.group, layout.H); h++) {
      prefetch_rows(k.row(other.begin, h), k.token, other.length, sizes.D);
      prefetch_rows(v.row(other.begin, h), v.token, other.length, sizes.E);
    }
  }

  // One tile of N queries from i0 on, for the keys of the block that they see.
  void tile(Buffers<C>& w, const Stream& stream, const Segment& segment, int64_t heads, int64_t j0, int64_t i0,
            int64_t N, const TileRows& rows, Turn& turn) const {
    const int64_t r0 = rows.begin, R = rows.count(), Np = padded_lanes<C>(N), L = segment.length, D = sizes.D,
                  E = sizes.E;
    const bool masked = !rows.whole || N != Np;
    if (masked) w.mask.set(w.reach.first + i0, w.reach.end + i0, i0, N, j0 + r0);
    if (sizes.timed) {
      for (int64_t c = 0; c < kLanes; c++) w.lane_times[c] = bias.query_times[segment.begin + std::min(i0 + c, L - 1)];
      find_buckets(bias.buckets, R, Np, w.row_times + r0, w.lane_times, w.tile);
    }
    const int64_t d = i0 - j0 - r0;
    for (int64_t g = 0; g < heads; g++) {
      const int64_t h = stream.head + g, at = g * sizes.block + r0;
      const bool own_sums = bias.per_head();
      if (bias.any() && (g == 0 || bias.per_head()))
        fill_bias(R, Np, w.tile, bias.time_of(h),
                  bias.has_position ? bias.position.ascending(bias.position_head(h), d) : nullptr, w.bias);
      pack_pairs_and_columns(q.row(segment.begin + i0, h), q.token, w.Q, w.Qt, N, D, Np);
      pack_pairs_and_columns(grad.row(segment.begin + i0, h), grad.token, w.G, w.Gt, N, E, Np);
      // The rows of the tile after this one are fetched in portions between the products (+5 to 8 %).
      const int64_t in = g + 1 < heads ? i0 : i0 + N, hn = g + 1 < heads ? h + 1 : stream.head;
      const int64_t ahead = in < L ? std::min(kLanes, L - in) : 0, half = ahead / 2;
      const auto fetch = [&](const Operand<const In>& o, int64_t from, int64_t n, int64_t dims) {
        if (n > 0) prefetch_rows(o.row(segment.begin + in + from, hn), o.token, n, dims);
      };
      fetch(q, 0, half, D);
      multiply(R, Np, sizes.Dk, w.K + at * sizes.Dk, sizes.Dk, w.Qt, Np, w.S, kLanes, false);
      fetch(q, half, ahead - half, D);
      multiply(R, Np, sizes.Ek, w.V_ + at * sizes.Ek, sizes.Ek, w.Gt, Np, w.dP, kLanes, false);
      fetch(grad, 0, half, E);
      by_lanes(Np, [&](auto lanes) { differentiate_tile<decltype(lanes)::value>(w, R, masked, g == 0 || own_sums); });
      multiply(R, E, Np, w.P, kLanes, w.G, E, w.dV + at * E, E, true);
      fetch(grad, half, ahead - half, E);
      multiply(R, D, Np, w.dS, kLanes, w.Q, D, w.dK + at * D, D, true);
      multiply(D, Np, R, w.Kt + g * sizes.block * sizes.Dk + r0, sizes.block, kLow<C> ? w.pairs : w.dS, kLanes, w.dQt,
               kLanes, false);
      turn.wait();
      add_transposed(w.dQt, kLanes, dq + ((segment.begin + i0) * layout.H + h) * D, layout.H * D, N, D, alpha * scale,
                     !turn.first());
      if (sizes.sums && (g == heads - 1 || own_sums))
        add_to_tables(R, Np, w.sums, w.tile, tables.time_of(w.time_gradient, g),
                      tables.position_of(w.position_gradient, g, d));
    }
  }

  template <int n>
  void differentiate_tile(Buffers<C>& w, int64_t R, bool masked, bool stores) const {
    const auto go = [&](auto biased, auto masks, auto sum) {
      differentiate<n, biased.value, masks.value, decltype(sum)::value>(R, w.S, w.dP, w.bias, w.P, w.dS, w.pairs,
                                                                        w.sums, alpha, w.mask);
    };
    const auto with = [&](auto biased, auto sum) {
      masked ? go(biased, std::true_type(), sum) : go(biased, std::false_type(), sum);
    };
    if (!sizes.biased)
      with(std::false_type(), std::integral_constant<Sum, Sum::kNone>());
    else if (!sizes.sums)
      with(std::true_type(), std::integral_constant<Sum, Sum::kNone>());
    else if (stores)
      with(std::true_type(), std::integral_constant<Sum, Sum::kStore>());
    else
      with(std::true_type(), std::integral_constant<Sum, Sum::kAdd>());
  }
};

template <class In, class C>
std::vector<at::Tensor> run_on(const Layout& layout, const at::Tensor& grad_, const AttentionArguments& a,
                               bool time_gradient, bool position_gradient) {
  const Bias bias(a, layout);
  TORCH_CHECK_VALUE(grad_.dim() == 3 && grad_.sizes() == a.v.sizes(), "the gradient must be of the output's shape");
  const at::Tensor q = readable(a.q), k = readable(a.k), v = readable(a.v), grad = readable(grad_);
  at::Tensor dq = at::empty({layout.T, layout.H, layout.D}, q.options()),
             dk = at::empty({layout.T, layout.H, layout.D}, q.options()),
             dv = at::empty({layout.T, layout.H, layout.E}, q.options());
  constexpr bool exact = std::is_same_v<In, float>;
  // Narrower types: dq is added up in float32.
  SharedArray<float> wide(exact ? 0 : dq.numel());
  float* sums;
  if constexpr (exact)
    sums = dq.template mutable_data_ptr<float>();
  else
    sums = wide.get();
  const TableShape time{time_gradient ? bias.time_entries : 0, bias.time_stride > 0},
      position{position_gradient ? bias.position_entries : 0, bias.position_per_head};
  KeyBlocks blocks(layout, std::min(kBlock, round_up(layout.longest, 16)), heads_at_once(layout, bias.any()));
  TableGradients tables(blocks, time, position, bias.before);
  const Sizes sizes{blocks.block,
                    blocks.group,
                    layout.D,
                    padded_dim<C>(layout.D),
                    layout.E,
                    padded_dim<C>(layout.E),
                    layout.longest,
                    bias.time != nullptr,
                    bias.any(),
                    tables.any(),
                    tables.time_floats(),
                    tables.position_floats()};
  const Backward<In, C> work{layout,
                             bias,
                             blocks,
                             tables,
                             operand<In>(q),
                             operand<In>(k),
                             operand<In>(v),
                             operand<In>(grad),
                             sums,
                             dk.mutable_data_ptr<In>(),
                             dv.mutable_data_ptr<In>(),
                             static_cast<float>(a.alpha),
                             static_cast<float>(a.scale),
                             sizes};
  blocks.run<Buffers<C>>(sizes, kLow<C>,
                         [&](Buffers<C>& w, Stream& stream, int64_t number) { work.unit(w, stream, number); });
  if constexpr (!exact) {
    In* to = dq.mutable_data_ptr<In>();
    at::parallel_for(0, dq.numel(), 1 << 16, [&](int64_t x, int64_t y) { scale_row(sums + x, 1.f, to + x, y - x); });
  }
  return {dq, dk, dv, tables.time_total(a.scale), tables.position_total(a.scale)};
}

template <class In, class C>
std::vector<at::Tensor> run(const at::Tensor& grad, const AttentionArguments& a, bool time_gradient,
                            bool position_gradient) {
  Layout layout(a);
  return with_rows_apart_if_spoiled(
      layout, [&](const Layout& l) { return run_on<In, C>(l, grad, a, time_gradient, position_gradient); });
}

}  // namespace

std::vector<at::Tensor> backward(const at::Tensor& grad, const AttentionArguments& a, bool time_gradient,
                                 bool position_gradient) {
  check_operands(a, grad);
  switch (a.q.scalar_type()) {
    case at::kFloat:
      return run<float, float>(grad, a, time_gradient, position_gradient);
    case at::kHalf:
      return run<Half, float>(grad, a, time_gradient, position_gradient);
    default:
#if defined(__AVX512BF16__)
      if (packed_bf16()) return run<BFloat16, BFloat16>(grad, a, time_gradient, position_gradient);
#endif
      return run<BFloat16, float>(grad, a, time_gradient, position_gradient);
  }
}

}  // namespace turbogr::hstu

// Forward: a unit owns a block of queries of one segment and a group of heads, and goes over tiles of keys.
//
// Per tile and head: S = Q K^T, P = SiLU(alpha S + bias), O += P V. The bias tile is made once for the group of heads;
// scale multiplies the accumulators when they are written, never the tiles.
#include "jagged_attention.h"
#include "query_blocks.h"

namespace turbogr::hstu {
namespace {

// P = SiLU(alpha S + bias) of R rows, zero where not allowed. Reaches are those of the rows, i0 the position of the
// first.
template <int n, bool HasBias, bool Masked, class C>
void activate(int64_t R, const float* S, const float* bias, C* P, float alpha, const int32_t* first, const int32_t* end,
              int64_t i0, int64_t j0) {
  const V a(alpha);
  V lanes[n];
  if constexpr (Masked)
    for (int c = 0; c < n; c++) lanes[c] = lane_numbers(c * V::size());
  for (int64_t r = 0; r < R; r++) {
    V x[n];
    for (int c = 0; c < n; c++) {
      V s = V::loadu(S + r * kLanes + c * V::size());
      if constexpr (HasBias)
        s = at::vec::fmadd(s, a, V::loadu(bias + r * kLanes + c * V::size()));
      else
        s = s * a;
      x[c] = s * sigmoid<kLow<C>>(s);
    }
    if constexpr (Masked) {
      const RowMask mask(first[r], end[r], i0 + r, j0);
      for (int c = 0; c < n; c++) x[c] = x[c] & mask(lanes[c]);
    }
    store_row(P + r * kLanes, x, n);
  }
}

struct Sizes {
  int64_t block, group, D, Dk, E;
  bool timed, biased;
};

template <class C>
struct Buffers {
  C *Q, *P, *K, *V_, *scratch;
  float *O, *S, *bias;
  BucketTile tile;
  int64_t *row_times, *lane_times;
  int32_t *first, *end;

  Buffers(Cutter& cut, const Sizes& s) {
    Q = cut.take<C>(s.group * s.block * s.Dk);
    O = cut.take<float>(s.group * s.block * s.E);
    S = cut.take<float>(s.block * kLanes);
    P = kLow<C> ? cut.take<C>(s.block * kLanes) : reinterpret_cast<C*>(S);  // float32 works in place
    K = cut.take<C>(kLanes * round_up(s.D, 2));
    V_ = cut.take<C>(kLanes * s.E);
    scratch = cut.take<C>(kLanes * s.D);
    bias = cut.take<float>(s.biased ? s.block * kLanes : 0);
    tile.buckets = cut.take<int32_t>(s.timed ? s.block * kLanes : 0);
    tile.uniform = cut.take<uint8_t>(s.timed ? s.block : 0);
    row_times = cut.take<int64_t>(s.timed ? s.block : 0);
    lane_times = cut.take<int64_t>(kLanes);
    first = cut.take<int32_t>(s.block);
    end = cut.take<int32_t>(s.block);
  }
};

template <class In, class C>
struct Forward {
  const Layout& layout;
  const Bias& bias;
  Operand<const In> q, k, v;
  In* out;
  float alpha, scale;
  Sizes sizes;

  // One tile of N keys from j0 on for the rows of the block that reach it.
  void tile(Buffers<C>& w, const QueryUnit& u, const Segment& segment, int64_t heads, int64_t j0, int64_t N,
            const TileRows& rows, int64_t keys_end, bool add) const {
    const int64_t r0 = rows.begin, R = rows.count(), Np = padded_lanes<C>(N), L = segment.length, D = sizes.D,
                  E = sizes.E;
    const bool masked = !rows.whole || N != Np;
    if (bias.time != nullptr) {
      for (int64_t c = 0; c < kLanes; c++) w.lane_times[c] = bias.key_times[segment.begin + std::min(j0 + c, L - 1)];
      find_buckets(bias.buckets, R, Np, w.row_times + r0, w.lane_times, w.tile);
    }
    const int64_t d = u.i0 + r0 - j0;
    for (int64_t g = 0; g < heads; g++) {
      const int64_t h = u.head + g;
      if (bias.any() && (g == 0 || bias.per_head()))
        fill_bias(R, Np, w.tile, bias.time_of(h),
                  bias.has_position ? bias.position.descending(bias.position_head(h), d) : nullptr, w.bias);
      pack_columns(k.row(segment.begin + j0, h), k.token, w.K, w.scratch, N, D, Np);
      pack_pairs(v.row(segment.begin + j0, h), v.token, w.V_, N, E, Np);
      // The rows of the tile after this one are fetched between the products: in one burst they would stall.
      const int64_t jn = g + 1 < heads ? j0 : j0 + N, hn = g + 1 < heads ? h + 1 : u.head;
      const int64_t ahead = jn < keys_end ? std::min(kLanes, L - jn) : 0;
      if (ahead > 0) prefetch_rows(k.row(segment.begin + jn, hn), k.token, ahead, D);
      multiply(R, Np, sizes.Dk, w.Q + (g * sizes.block + r0) * sizes.Dk, sizes.Dk, w.K, Np, w.S, kLanes, false);
      if (ahead > 0) prefetch_rows(v.row(segment.begin + jn, hn), v.token, ahead, E);
      by_lanes(Np, [&](auto lanes) {
        constexpr int n = decltype(lanes)::value;
        const auto go = [&](auto biased, auto masks) {
          activate<n, biased.value, masks.value>(R, w.S, w.bias, w.P, alpha, w.first + r0, w.end + r0, u.i0 + r0, j0);
        };
        const auto with = [&](auto biased) { masked ? go(biased, std::true_type()) : go(biased, std::false_type()); };
        bias.any() ? with(std::true_type()) : with(std::false_type());
      });
      multiply(R, E, Np, w.P, kLanes, w.V_, E, w.O + (g * sizes.block + r0) * E, E, add);
    }
  }

  void unit(Buffers<C>& w, const QueryUnit& u) const {
    const Segment& segment = layout.segments[u.segment];
    const int64_t L = segment.length, M = std::min(sizes.block, L - u.i0), Mp = round_up(M, 16),
                  heads = std::min(sizes.group, layout.H - u.head);
    if (L <= kShort) {  // over before a fetch between its products helps
      prefetch_rows(k.row(segment.begin, u.head), k.token, L, sizes.D);
      prefetch_rows(v.row(segment.begin, u.head), v.token, L, sizes.E);
    }
    find_reach(segment, layout.offsets, layout.mask, u.i0, u.i0 + M, w.first, w.end);
    for (int64_t r = M; r < Mp; r++) w.first[r] = w.end[r] = 0;
    if (bias.time != nullptr)
      for (int64_t r = 0; r < Mp; r++) w.row_times[r] = bias.query_times[segment.begin + std::min(u.i0 + r, L - 1)];
    for (int64_t g = 0; g < heads; g++)
      pack_rows(q.row(segment.begin + u.i0, u.head + g), q.token, w.Q + g * sizes.block * sizes.Dk, M, sizes.D,
                sizes.Dk, Mp);
    bool add = false;
    for_key_tiles(w.first, w.end, u.i0, M, L, [&](int64_t j0, int64_t N, const TileRows& rows, int64_t keys_end) {
      if (!add && rows.count() < Mp) {  // the first tile does not write all sums
        for (int64_t g = 0; g < heads; g++) std::fill_n(w.O + g * sizes.block * sizes.E, Mp * sizes.E, 0.f);
        add = true;
      }
      tile(w, u, segment, heads, j0, N, rows, keys_end, add);
      add = true;
    });
    if (segment.end_row > segment.first_row + 1)
      for (int64_t x = 0; x < heads; x++)
        if (!all_finite(w.O + x * sizes.block * sizes.E, M * sizes.E)) layout.spoiled = true;
    for (int64_t g = 0; g < heads; g++)
      for (int64_t r = 0; r < M; r++)
        scale_row(w.O + (g * sizes.block + r) * sizes.E, scale,
                  out + ((segment.begin + u.i0 + r) * layout.H + u.head + g) * sizes.E, sizes.E);
  }
};

template <class In, class C>
at::Tensor run_on(const Layout& layout, const AttentionArguments& a) {
  const Bias bias(a, layout);
  const at::Tensor q = readable(a.q), k = readable(a.k), v = readable(a.v);
  at::Tensor out = at::empty({layout.T, layout.H, layout.E}, v.options());
  const Sizes sizes{std::min(kBlock, round_up(layout.longest, 16)),
                    heads_at_once(layout, bias.any()),
                    layout.D,
                    padded_dim<C>(layout.D),
                    layout.E,
                    bias.time != nullptr,
                    bias.any()};
  const Forward<In, C> work{layout,
                            bias,
                            operand<In>(q),
                            operand<In>(k),
                            operand<In>(v),
                            out.mutable_data_ptr<In>(),
                            static_cast<float>(a.alpha),
                            static_cast<float>(a.scale),
                            sizes};
  run_query_units<Buffers<C>>(query_units(layout, sizes.block, sizes.group), sizes, kLow<C>,
                              [&](Buffers<C>& w, const QueryUnit& u) { work.unit(w, u); });
  return out;
}

template <class In, class C>
at::Tensor run(const AttentionArguments& a) {
  Layout layout(a);
  return with_rows_apart_if_spoiled(layout, [&](const Layout& l) { return run_on<In, C>(l, a); });
}

}  // namespace

at::Tensor forward(const AttentionArguments& a) {
  check_operands(a, std::nullopt);
  switch (a.q.scalar_type()) {
    case at::kFloat:
      return run<float, float>(a);
    case at::kHalf:
      return run<Half, float>(a);
    default:
#if defined(__AVX512BF16__)
      if (packed_bf16()) return run<BFloat16, BFloat16>(a);
#endif
      return run<BFloat16, float>(a);
  }
}

}  // namespace turbogr::hstu

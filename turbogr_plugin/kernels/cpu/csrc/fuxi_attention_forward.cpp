// Forward: blocks of queries over tiles of keys, as HSTU's. The weights of both other channels are made once per tile
// for all heads of a group (where the heads share them), and the three products with V share its packed tile.
#include "channel_weights.h"
#include "fuxi_attention.h"
#include "query_blocks.h"

namespace turbogr::fuxi {
namespace {

// P = SiLU(alpha S) of R rows, zero where not allowed.
template <int n, class C>
void activate(int64_t R, const float* S, C* P, float alpha, bool masked, const int32_t* first, const int32_t* end,
              int64_t i0, int64_t j0) {
  const V a(alpha);
  for (int64_t r = 0; r < R; r++) {
    V x[n];
    for (int c = 0; c < n; c++) {
      const V s = V::loadu(S + r * kLanes + c * V::size()) * a;
      x[c] = s * sigmoid<kLow<C>>(s);
    }
    if (masked) {
      const RowMask mask(first[r], end[r], i0 + r, j0);
      for (int c = 0; c < n; c++) x[c] = x[c] & mask(lane_numbers(c * V::size()));
    }
    store_row(P + r * kLanes, x, n);
  }
}

struct Sizes {
  int64_t block, group, D, Dk, E;
};

template <class C>
struct Buffers {
  C *Q, *P, *time, *position, *K, *V_, *scratch;
  float *O, *S, *values, *gaps;
  BucketTile tile;
  int64_t *row_times, *lane_times;
  int32_t *first, *end;

  Buffers(Cutter& cut, const Sizes& s) {
    Q = cut.take<C>(s.group * s.block * s.Dk);
    O = cut.take<float>(3 * s.group * s.block * s.E);
    S = cut.take<float>(s.block * kLanes);
    P = kLow<C> ? cut.take<C>(s.block * kLanes) : reinterpret_cast<C*>(S);  // float32 works in place
    time = cut.take<C>(s.block * kLanes);
    position = cut.take<C>(s.block * kLanes);
    values = cut.take<float>(s.block * kLanes);
    gaps = cut.take<float>(s.block * kLanes);
    K = cut.take<C>(kLanes * round_up(s.D, 2));
    V_ = cut.take<C>(kLanes * s.E);
    scratch = cut.take<C>(kLanes * s.D);
    tile.buckets = cut.take<int32_t>(s.block * kLanes);
    tile.uniform = cut.take<uint8_t>(s.block);
    row_times = cut.take<int64_t>(s.block);
    lane_times = cut.take<int64_t>(kLanes);
    first = cut.take<int32_t>(s.block);
    end = cut.take<int32_t>(s.block);
  }
};

template <class In, class C>
struct Forward {
  const Layout& layout;
  const Channels& channels;
  Operand<const In> q, k, v;
  In* out;  // [T, H, 3 E]
  float alpha, scale, bias_scale;
  Sizes sizes;

  // Sums of a head's channel.
  float* sums(const Buffers<C>& w, int64_t g, int64_t channel) const {
    return w.O + (g * 3 + channel) * sizes.block * sizes.E;
  }

  void tile(Buffers<C>& w, const QueryUnit& u, const Segment& segment, int64_t heads, int64_t j0, int64_t N,
            const TileRows& rows, int64_t keys_end, bool add) const {
    const int64_t r0 = rows.begin, R = rows.count(), Np = padded_lanes<C>(N), L = segment.length, D = sizes.D,
                  E = sizes.E, d = u.i0 + r0 - j0;
    const bool masked = !rows.whole || N != Np;
    const Bias& bias = channels.bias;
    const auto mask = [&](int64_t r) {
      return [of_row = RowMask(w.first[r0 + r], w.end[r0 + r], u.i0 + r0 + r, j0)](int64_t lane) {
        return of_row(lane_numbers(lane));
      };
    };
    for (int64_t c = 0; c < kLanes; c++) w.lane_times[c] = bias.key_times[segment.begin + std::min(j0 + c, L - 1)];
    if (channels.decays())
      find_gaps(R, Np, w.row_times + r0, w.lane_times, w.gaps);
    else
      find_buckets(bias.buckets, R, Np, w.row_times + r0, w.lane_times, w.tile);
    for (int64_t g = 0; g < heads; g++) {
      const int64_t h = u.head + g;
      if (g == 0 || channels.time_per_head()) {
        if (channels.decays())
          fill_decay(R, Np, w.gaps, channels.decay_of(h), w.values);
        else
          fill_bias(R, Np, w.tile, bias.time_of(h), nullptr, w.values);
        store_weights(R, Np, w.values, masked, mask, w.time);
      }
      if (g == 0 || bias.position_per_head) {
        fill_bias(R, Np, w.tile, nullptr, bias.position.descending(bias.position_head(h), d), w.values);
        store_weights(R, Np, w.values, masked, mask, w.position);
      }
      pack_columns(k.row(segment.begin + j0, h), k.token, w.K, w.scratch, N, D, Np);
      pack_pairs(v.row(segment.begin + j0, h), v.token, w.V_, N, E, Np);
      const int64_t jn = g + 1 < heads ? j0 : j0 + N, hn = g + 1 < heads ? h + 1 : u.head;
      const int64_t ahead = jn < keys_end ? std::min(kLanes, L - jn) : 0;
      if (ahead > 0) prefetch_rows(k.row(segment.begin + jn, hn), k.token, ahead, D);
      multiply(R, Np, sizes.Dk, w.Q + (g * sizes.block + r0) * sizes.Dk, sizes.Dk, w.K, Np, w.S, kLanes, false);
      if (ahead > 0) prefetch_rows(v.row(segment.begin + jn, hn), v.token, ahead, E);
      by_lanes(Np, [&](auto lanes) {
        activate<decltype(lanes)::value>(R, w.S, w.P, alpha, masked, w.first + r0, w.end + r0, u.i0 + r0, j0);
      });
      multiply(R, E, Np, w.P, kLanes, w.V_, E, sums(w, g, 0) + r0 * E, E, add);
      multiply(R, E, Np, w.time, kLanes, w.V_, E, sums(w, g, 1) + r0 * E, E, add);
      multiply(R, E, Np, w.position, kLanes, w.V_, E, sums(w, g, 2) + r0 * E, E, add);
    }
  }

  void unit(Buffers<C>& w, const QueryUnit& u) const {
    const Segment& segment = layout.segments[u.segment];
    const int64_t L = segment.length, M = std::min(sizes.block, L - u.i0), Mp = round_up(M, 16),
                  heads = std::min(sizes.group, layout.H - u.head);
    find_reach(segment, layout.offsets, layout.mask, u.i0, u.i0 + M, w.first, w.end);
    for (int64_t r = M; r < Mp; r++) w.first[r] = w.end[r] = 0;
    for (int64_t r = 0; r < Mp; r++)
      w.row_times[r] = channels.bias.query_times[segment.begin + std::min(u.i0 + r, L - 1)];
    for (int64_t g = 0; g < heads; g++)
      pack_rows(q.row(segment.begin + u.i0, u.head + g), q.token, w.Q + g * sizes.block * sizes.Dk, M, sizes.D,
                sizes.Dk, Mp);
    bool add = false;
    for_key_tiles(w.first, w.end, u.i0, M, L, [&](int64_t j0, int64_t N, const TileRows& rows, int64_t keys_end) {
      if (!add && rows.count() < Mp) {  // the first tile does not write all sums
        for (int64_t x = 0; x < 3 * heads; x++) std::fill_n(w.O + x * sizes.block * sizes.E, Mp * sizes.E, 0.f);
        add = true;
      }
      tile(w, u, segment, heads, j0, N, rows, keys_end, add);
      add = true;
    });
    if (segment.end_row > segment.first_row + 1)
      for (int64_t x = 0; x < 3 * heads; x++)
        if (!all_finite(w.O + x * sizes.block * sizes.E, M * sizes.E)) layout.spoiled = true;
    for (int64_t g = 0; g < heads; g++)
      for (int64_t r = 0; r < M; r++) {
        In* to = out + ((segment.begin + u.i0 + r) * layout.H + u.head + g) * 3 * sizes.E;
        for (int64_t channel = 0; channel < 3; channel++)
          scale_row(sums(w, g, channel) + r * sizes.E, channel == 0 ? scale : bias_scale, to + channel * sizes.E,
                    sizes.E);
      }
  }
};

template <class In, class C>
at::Tensor run_on(const Layout& layout, const Arguments& call) {
  const AttentionArguments& a = call.attention;
  const Channels channels(a, call.time_decay, layout);
  const at::Tensor q = readable(a.q), k = readable(a.k), v = readable(a.v);
  at::Tensor out = at::empty({layout.T, layout.H, 3 * layout.E}, v.options());
  const Sizes sizes{std::min(kBlock, round_up(layout.longest, 16)), heads_at_once(layout, true), layout.D,
                    padded_dim<C>(layout.D), layout.E};
  const Forward<In, C> work{layout,
                            channels,
                            operand<In>(q),
                            operand<In>(k),
                            operand<In>(v),
                            out.mutable_data_ptr<In>(),
                            static_cast<float>(a.alpha),
                            static_cast<float>(a.scale),
                            static_cast<float>(call.bias_scale),
                            sizes};
  run_query_units<Buffers<C>>(query_units(layout, sizes.block, sizes.group), sizes, kLow<C>,
                              [&](Buffers<C>& w, const QueryUnit& u) { work.unit(w, u); });
  return out;
}

template <class In, class C>
at::Tensor run(const Arguments& call) {
  Layout layout(call.attention);
  return with_rows_apart_if_spoiled(layout, [&](const Layout& l) { return run_on<In, C>(l, call); });
}

}  // namespace

at::Tensor forward(const Arguments& a) {
  check_operands(a.attention, std::nullopt);
  switch (a.attention.q.scalar_type()) {
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

}  // namespace turbogr::fuxi

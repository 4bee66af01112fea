// Backward: blocks of keys over tiles of queries on the transposed scores, as HSTU's; see
// jagged_attention_backward.cpp.
//
// Per tile and head, with dO the gradients of the semantic, temporal and positional channels and W, B the other two's
// weights:
//
//     S^T = K Q^T    dP^T = V dO_s^T    dV += P^T dO_s    dK += dS^T Q    dQ^T = K^T dS^T
//     dU += W^T dO_t    dU += B^T dO_p    dW^T = V dO_t^T    dB^T = V dO_p^T
//
// dU is the part of dV that bias_scale multiplies. The last two are for the tables; shared by the heads, the product
// itself adds the heads up.
#include "channel_weights.h"
#include "fuxi_attention.h"
#include "key_blocks.h"
#include "table_gradients.h"

namespace turbogr::fuxi {
namespace {

// P and dS from S and dP, in place of them in float32; `pairs` gets dS in pairs of rows for bf16.
template <int n, class C>
void differentiate(int64_t R, const float* S, const float* dP, C* P, C* dS, C* pairs, float alpha, bool masked,
                   const LaneMask& mask) {
  const V a(alpha), one(1.f);
  for (int64_t r = 0; r < R; r++) {
    V x[n], y[n];
    for (int c = 0; c < n; c++) {
      const int64_t o = r * kLanes + c * V::size();
      const V s = V::loadu(S + o) * a, g = sigmoid<kLow<C>>(s);
      x[c] = s * g;
      y[c] = V::loadu(dP + o) * at::vec::fmadd(x[c], one - g, g);
    }
    if (masked)
      for (int c = 0; c < n; c++) {
        const V allowed = mask(r, c * V::size());
        x[c] = x[c] & allowed;
        y[c] = y[c] & allowed;
      }
    store_row(P + r * kLanes, x, n);
    store_row(dS + r * kLanes, y, n);
    if constexpr (kLow<C>)
      if (r % 2 == 1) interleave(dS + (r - 1) * kLanes, dS + r * kLanes, pairs + (r - 1) * kLanes, n * V::size());
  }
}

struct Sizes {
  int64_t block, group, D, Dk, E, Ek, longest;
  bool time, position;                   // gradients of the tables that are asked for
  int64_t time_floats, position_floats;  // of a thread's own
};

template <class C>
struct Buffers {
  C *K, *Kt, *V_, *Q, *Qt, *G[3], *Gt, *P, *dS, *pairs, *time, *position;
  float *dK, *dV, *dU, *S, *dP, *dW, *dB, *dQt, *values, *gaps, *time_gradient, *position_gradient;
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
    dU = cut.take<float>(s.group * s.block * s.E);
    Q = cut.take<C>(kLanes * s.D);
    Qt = cut.take<C>(kLanes * s.Dk);
    for (C*& g : G) g = cut.take<C>(kLanes * s.E);
    Gt = cut.take<C>(kLanes * s.Ek);
    S = cut.take<float>(s.block * kLanes);
    dP = cut.take<float>(s.block * kLanes);
    P = kLow<C> ? cut.take<C>(s.block * kLanes) : reinterpret_cast<C*>(S);  // float32 works in place
    dS = kLow<C> ? cut.take<C>(s.block * kLanes) : reinterpret_cast<C*>(dP);
    pairs = cut.take<C>(kLow<C> ? s.block * kLanes : 0);
    time = cut.take<C>(s.block * kLanes);
    position = cut.take<C>(s.block * kLanes);
    dW = cut.take<float>(s.time ? s.block * kLanes : 0);
    dB = cut.take<float>(s.position ? s.block * kLanes : 0);
    dQt = cut.take<float>(round_up(s.D, 16) * kLanes);
    values = cut.take<float>(s.block * kLanes);
    gaps = cut.take<float>(s.block * kLanes);
    tile.buckets = cut.take<int32_t>(s.block * kLanes);
    tile.uniform = cut.take<uint8_t>(s.block);
    row_times = cut.take<int64_t>(s.block);
    lane_times = cut.take<int64_t>(kLanes);
    time_gradient = cut.take<float>(s.time_floats);
    position_gradient = cut.take<float>(s.position_floats);
    reach = SegmentReach(cut, s.longest);
  }
};

template <class In, class C>
struct Backward {
  const Layout& layout;
  const Channels& channels;
  KeyBlocks& blocks;
  TableGradients& tables;
  Operand<const In> q, k, v, grad;  // grad: [T, H, 3 E]
  float* dq;                        // [T, H, D], float32
  In *dk, *dv;
  float alpha, scale, bias_scale;
  Sizes sizes;

  void unit(Buffers<C>& w, Stream& stream, int64_t number) const {
    const Segment& segment = layout.segments[stream.segment];
    const int64_t L = segment.length, j0 = number * sizes.block, M = std::min(sizes.block, L - j0),
                  Mp = round_up(M, 16), heads = std::min(sizes.group, layout.H - stream.head), E = sizes.E;
    for (int64_t g = 0; g < heads; g++) {
      const int64_t h = stream.head + g, at = g * sizes.block;
      pack_rows(k.row(segment.begin + j0, h), k.token, w.K + at * sizes.Dk, M, sizes.D, sizes.Dk, Mp);
      pack_rows(v.row(segment.begin + j0, h), v.token, w.V_ + at * sizes.Ek, M, E, sizes.Ek, Mp);
      pack_turned(w.K + at * sizes.Dk, sizes.Dk, w.Kt + at * sizes.Dk, sizes.block, sizes.D, Mp);
      std::fill_n(w.dK + at * sizes.D, Mp * sizes.D, 0.f);
      std::fill_n(w.dV + at * E, Mp * E, 0.f);
      std::fill_n(w.dU + at * E, Mp * E, 0.f);
    }
    for (int64_t r = 0; r < Mp; r++) w.row_times[r] = channels.bias.key_times[segment.begin + std::min(j0 + r, L - 1)];
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
        finite &= all_finite(w.dK + at * sizes.D, M * sizes.D) && all_finite(w.dV + at * sizes.E, M * sizes.E) &&
                  all_finite(w.dU + at * sizes.E, M * sizes.E);
      for (int64_t r = 0; r < M; r++)
        finite &= all_finite(dq + ((segment.begin + r) * layout.H + stream.head) * sizes.D, heads * sizes.D);
      if (!finite) layout.spoiled = true;
    }
    for (int64_t g = 0; g < heads; g++)
      for (int64_t r = 0; r < M; r++) {
        const int64_t at = (segment.begin + j0 + r) * layout.H + stream.head + g, own = g * sizes.block + r;
        scale_row(w.dK + own * sizes.D, alpha * scale, dk + at * sizes.D, sizes.D);
        for (int64_t e = 0; e < E; e++) dv[at * E + e] = In(w.dV[own * E + e] * scale + w.dU[own * E + e] * bias_scale);
      }
    if (tables.any()) tables.add(stream, number, w.time_gradient, w.position_gradient);
  }

  // The other channels' weights on a tile, for the h-th head or all.
  void weights(Buffers<C>& w, int64_t h, bool new_group, int64_t R, int64_t Np, int64_t d, bool masked) const {
    const Bias& bias = channels.bias;
    const auto mask = [&](int64_t r) { return [&w, r](int64_t lane) { return w.mask(r, lane); }; };
    if (new_group || channels.time_per_head()) {
      if (channels.decays())
        fill_decay(R, Np, w.gaps, channels.decay_of(h), w.values);
      else
        fill_bias(R, Np, w.tile, bias.time_of(h), nullptr, w.values);
      store_weights(R, Np, w.values, masked, mask, w.time);
    }
    if (new_group || bias.position_per_head) {
      fill_bias(R, Np, w.tile, nullptr, bias.position.ascending(bias.position_head(h), d), w.values);
      store_weights(R, Np, w.values, masked, mask, w.position);
    }
  }

  // One tile of N queries from i0 on, for the keys of the block that they see.
  void tile(Buffers<C>& w, const Stream& stream, const Segment& segment, int64_t heads, int64_t j0, int64_t i0,
            int64_t N, const TileRows& rows, Turn& turn) const {
    const int64_t r0 = rows.begin, R = rows.count(), Np = padded_lanes<C>(N), L = segment.length, D = sizes.D,
                  E = sizes.E, d = i0 - j0 - r0;
    const bool masked = !rows.whole || N != Np;
    if (masked) w.mask.set(w.reach.first + i0, w.reach.end + i0, i0, N, j0 + r0);
    for (int64_t c = 0; c < kLanes; c++)
      w.lane_times[c] = channels.bias.query_times[segment.begin + std::min(i0 + c, L - 1)];
    if (channels.decays())
      find_gaps(R, Np, w.row_times + r0, w.lane_times, w.gaps);
    else
      find_buckets(channels.bias.buckets, R, Np, w.row_times + r0, w.lane_times, w.tile);
    for (int64_t g = 0; g < heads; g++) {
      const int64_t h = stream.head + g, at = g * sizes.block + r0;
      weights(w, h, g == 0, R, Np, d, masked);
      pack_pairs_and_columns(q.row(segment.begin + i0, h), q.token, w.Q, w.Qt, N, D, Np);
      const In* gradient = grad.row(segment.begin + i0, h);
      pack_pairs_and_columns(gradient, grad.token, w.G[0], w.Gt, N, E, Np);
      const int64_t in = g + 1 < heads ? i0 : i0 + N, hn = g + 1 < heads ? h + 1 : stream.head;
      const int64_t ahead = in < L ? std::min(kLanes, L - in) : 0;
      if (ahead > 0) prefetch_rows(q.row(segment.begin + in, hn), q.token, ahead, D);
      multiply(R, Np, sizes.Dk, w.K + at * sizes.Dk, sizes.Dk, w.Qt, Np, w.S, kLanes, false);
      if (ahead > 0) prefetch_rows(grad.row(segment.begin + in, hn), grad.token, ahead, E);
      multiply(R, Np, sizes.Ek, w.V_ + at * sizes.Ek, sizes.Ek, w.Gt, Np, w.dP, kLanes, false);
      by_lanes(Np, [&](auto lanes) {
        differentiate<decltype(lanes)::value>(R, w.S, w.dP, w.P, w.dS, w.pairs, alpha, masked, w.mask);
      });
      multiply(R, E, Np, w.P, kLanes, w.G[0], E, w.dV + at * E, E, true);
      multiply(R, D, Np, w.dS, kLanes, w.Q, D, w.dK + at * D, D, true);
      multiply(D, Np, R, w.Kt + g * sizes.block * sizes.Dk + r0, sizes.block, kLow<C> ? w.pairs : w.dS, kLanes, w.dQt,
               kLanes, false);
      turn.wait();
      add_transposed(w.dQt, kLanes, dq + ((segment.begin + i0) * layout.H + h) * D, layout.H * D, N, D, alpha * scale,
                     !turn.first());
      if (ahead > 0) prefetch_rows(grad.row(segment.begin + in, hn) + E, grad.token, ahead, 2 * E);
      channel(w, w.time, gradient + E, w.G[1], g, at, R, N, Np, sizes.time ? w.dW : nullptr,
              g > 0 && !channels.time_per_head());
      channel(w, w.position, gradient + 2 * E, w.G[2], g, at, R, N, Np, sizes.position ? w.dB : nullptr,
              g > 0 && !channels.bias.position_per_head);
      const bool last = g == heads - 1;
      if (sizes.time && (last || channels.time_per_head())) {
        hide(w, R, Np, masked, w.dW);
        if (channels.decays())
          add_to_decay(R, Np, w.dW, w.gaps, channels.decay_of(h), tables.time_of(w.time_gradient, g));
        else
          add_to_tables(R, Np, w.dW, w.tile, tables.time_of(w.time_gradient, g), nullptr);
      }
      if (sizes.position && (last || channels.bias.position_per_head)) {
        hide(w, R, Np, masked, w.dB);
        add_to_tables(R, Np, w.dB, w.tile, nullptr, tables.position_of(w.position_gradient, g, d));
      }
    }
  }

  // One of the channels without scores: its part of dV, and the gradient of its weights where it is asked for.
  void channel(Buffers<C>& w, const C* weights, const In* gradient, C* pairs, int64_t g, int64_t at, int64_t R,
               int64_t N, int64_t Np, float* of_weights, bool add) const {
    const int64_t E = sizes.E;
    if (of_weights != nullptr) {
      pack_pairs_and_columns(gradient, grad.token, pairs, w.Gt, N, E, Np);
      multiply(R, Np, sizes.Ek, w.V_ + at * sizes.Ek, sizes.Ek, w.Gt, Np, of_weights, kLanes, add);
    } else {
      pack_pairs(gradient, grad.token, pairs, N, E, Np);
    }
    multiply(R, E, Np, weights, kLanes, pairs, E, w.dU + at * E, E, true);
  }

  void hide(const Buffers<C>& w, int64_t R, int64_t Np, bool masked, float* tile) const {
    if (masked)
      store_weights(
          R, Np, tile, true, [&](int64_t r) { return [&w, r](int64_t lane) { return w.mask(r, lane); }; }, tile);
  }
};

template <class In, class C>
std::vector<at::Tensor> run_on(const Layout& layout, const at::Tensor& grad_, const Arguments& call, bool time_gradient,
                               bool position_gradient) {
  const AttentionArguments& a = call.attention;
  const Channels channels(a, call.time_decay, layout);
  TORCH_CHECK_VALUE(
      grad_.dim() == 3 && grad_.size(0) == layout.T && grad_.size(1) == layout.H && grad_.size(2) == 3 * layout.E,
      "the gradient must be of the output's shape");
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
  const TableShape time{time_gradient ? channels.time_entries() : 0, channels.time_per_head()},
      position{position_gradient ? channels.bias.position_entries : 0, channels.bias.position_per_head};
  KeyBlocks blocks(layout, std::min(kBlock, round_up(layout.longest, 16)), heads_at_once(layout, true));
  TableGradients tables(blocks, time, position, channels.bias.before);
  const Sizes sizes{blocks.block,
                    blocks.group,
                    layout.D,
                    padded_dim<C>(layout.D),
                    layout.E,
                    padded_dim<C>(layout.E),
                    layout.longest,
                    time_gradient,
                    position_gradient,
                    tables.time_floats(),
                    tables.position_floats()};
  const Backward<In, C> work{layout,
                             channels,
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
                             static_cast<float>(call.bias_scale),
                             sizes};
  blocks.run<Buffers<C>>(sizes, kLow<C>,
                         [&](Buffers<C>& w, Stream& stream, int64_t number) { work.unit(w, stream, number); });
  if constexpr (!exact) {
    In* to = dq.mutable_data_ptr<In>();
    at::parallel_for(0, dq.numel(), 1 << 16, [&](int64_t x, int64_t y) { scale_row(sums + x, 1.f, to + x, y - x); });
  }
  return {dq, dk, dv, tables.time_total(call.bias_scale), tables.position_total(call.bias_scale)};
}

template <class In, class C>
std::vector<at::Tensor> run(const at::Tensor& grad, const Arguments& call, bool time_gradient, bool position_gradient) {
  Layout layout(call.attention);
  return with_rows_apart_if_spoiled(
      layout, [&](const Layout& l) { return run_on<In, C>(l, grad, call, time_gradient, position_gradient); });
}

}  // namespace

std::vector<at::Tensor> backward(const at::Tensor& grad, const Arguments& a, bool time_gradient,
                                 bool position_gradient) {
  check_operands(a.attention, grad);
  switch (a.attention.q.scalar_type()) {
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

}  // namespace turbogr::fuxi

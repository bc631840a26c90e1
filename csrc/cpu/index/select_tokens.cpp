// Scores keys and selects among them without keeping all scores. A thread scores a tile of neighbouring tokens of one
// request, and adds what exceeds a token's k-th best so far to its candidates. When these have no room, the best k
// stay. Where tokens are few, their contexts are split, and the splits' candidates are selected from again.
#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/common/features.h"
#include "cpu/common/kept_buffer.h"
#include "cpu/common/parallel.h"
#include "cpu/index/index.h"
#include "cpu/index/top.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

constexpr int32_t kTilePositions = 1024;  // 32 KB of scores; laying out queries takes a fortieth of their time
constexpr int32_t kUnit = 512;            // positions; splits are multiples of it
constexpr int64_t kItemsPerThread = 4;    // which take them in turn, as they are not equally long

// A token's, by rising position.
struct Candidates {
  float* scores;
  int32_t* positions;
  int32_t count = 0;
  float worst = -__builtin_inff();  // what later scores have to exceed; NaN exceeds all

  // The scores of positions from `first` on, for which there is room.
  void add(const float* from, int32_t first, int32_t many) {
    constexpr int32_t kBlock = 16;
    int32_t i = 0;
    for (; i + kBlock <= many; i += kBlock) {
      int32_t better = 0;  // in a long context mostly none, and before there is something to exceed all
      for (int32_t j = 0; j < kBlock; ++j) better += !(from[i + j] <= worst);
      if (better == kBlock) {
        for (int32_t j = 0; j < kBlock; ++j) scores[count + j] = from[i + j], positions[count + j] = first + i + j;
        count += kBlock;
      } else if (better > 0) {
        add_block(from + i, first + i, kBlock);
      }
    }
    add_block(from + i, first + i, many - i);
  }

  void keep_best(int32_t k, KeptBuffer& buffer) {
    if (count <= k) return;
    const Threshold last = kth_largest(scores, count, k, buffer);
    count = take_best(scores, count, k, last,
                      [this](int32_t n, int32_t i) { scores[n] = scores[i], positions[n] = positions[i]; });
    worst = score_of(last.value);
  }

 private:
  void add_block(const float* from, int32_t first, int32_t many) {
    for (int32_t i = 0; i < many; ++i) {
      scores[count] = from[i], positions[count] = first + i;
      count += !(from[i] <= worst);
    }
  }
};

// Neighbouring tokens of one request, and splits of their contexts.
struct Group {
  int64_t token;
  int32_t tokens;
  int64_t item;  // the first of its items, one a split
  int32_t splits;
};

// A split of a group. If it is not the only one, its tokens' candidates are kept from `kept` on, with room for so many
// of each, and their numbers from `counts` on.
struct Item {
  int64_t group;
  int32_t begin, end;
  int64_t kept, counts;
  int32_t room;
};

class Selection {
 public:
  explicit Selection(const SelectTokensProblem& p) : p_(p) { divide(); }

  void run() {
    thread_local KeptBuffer buffer;
    scores_ = static_cast<float*>(buffer.get(kept_ * (sizeof(float) + sizeof(int32_t)) + counts_ * sizeof(int32_t)));
    positions_ = reinterpret_cast<int32_t*>(scores_ + kept_);
    found_ = positions_ + kept_;
    for_each(static_cast<int64_t>(items_.size()), [&](int64_t item) { score(items_[item]); });
    for_each(static_cast<int64_t>(split_.size()), [&](int64_t i) { combine(groups_[split_[i]]); });
    if (some_take_all_ || p_.positions == 0)
      for_each_in_ranges(p_.tokens, 8, [&](int64_t token) {
        if (takes_all(token))
          take_all(token);
        else if (p_.positions == 0)
          finish(token, 0);
      });
  }

 private:
  bool takes_all(int64_t token) const { return p_.length[token] <= p_.topk; }

  // How many of a token's positions need scores.
  int32_t scored(int64_t token) const {
    if (takes_all(token)) return p_.chosen_scores ? std::max(p_.length[token], 0) : 0;
    return std::min(p_.length[token], p_.positions);
  }

  void divide() {
    int64_t work = 0;
    for (int64_t token = 0; token < p_.tokens; ++token) {
      work += scored(token);
      some_take_all_ |= takes_all(token);
    }
    const int64_t threads = thread_count();
    const int64_t share = std::max<int64_t>(1, threads == 1 ? work : work / (kItemsPerThread * threads));
    for (int64_t token = 0; token < p_.tokens;) {
      const int64_t first = token;
      int32_t longest = 0;
      // the more tokens share a key, the less often it is converted
      do longest = std::max(longest, scored(token++));
      while (token < p_.tokens && token - first < kScoreTokens && p_.request[token] == p_.request[first] &&
             p_.candidate_blocks.size == 0);
      if (longest > 0) divide(first, static_cast<int32_t>(token - first), longest, share);
    }
  }

  void divide(int64_t token, int32_t tokens, int32_t longest, int64_t share) {
    const int64_t units = (int64_t{longest} + kUnit - 1) / kUnit, work = int64_t{longest} * tokens;
    const int64_t wanted = std::clamp<int64_t>(work / share, 1, units), per_split = (units + wanted - 1) / wanted;
    const int32_t splits = static_cast<int32_t>((units + per_split - 1) / per_split);
    const int64_t group = static_cast<int64_t>(groups_.size()), step = per_split * kUnit;
    groups_.push_back({token, tokens, static_cast<int64_t>(items_.size()), splits});
    if (splits > 1) split_.push_back(group);
    for (int64_t begin = 0; begin < longest; begin += step) {
      const auto end = static_cast<int32_t>(std::min<int64_t>(longest, begin + step));
      const auto room = splits > 1 ? static_cast<int32_t>(std::min<int64_t>(end - begin, room_)) : 0;
      items_.push_back({group, static_cast<int32_t>(begin), end, kept_, counts_, room});
      kept_ += int64_t{room} * tokens;
      if (splits > 1) counts_ += tokens;
    }
  }

  void score(const Item& item) {
    thread_local KeptBuffer buffer, selecting;
    const IndexKernel& kernel = *active_kernels().index;
    const Group& group = groups_[item.group];
    const bool whole = group.splits == 1;
    const size_t kernel_bytes = (kernel.workspace_bytes + 63) / 64 * 64;
    const int64_t own_room = whole ? room_ : 0;
    auto* const memory = static_cast<uint8_t*>(buffer.get(
        kernel_bytes + kScoreTokens * (kTilePositions * sizeof(float) + own_room * (sizeof(float) + sizeof(int32_t)))));
    auto* const tile = reinterpret_cast<float*>(memory + kernel_bytes);
    float* const scores = whole ? tile + kScoreTokens * kTilePositions : scores_ + item.kept;
    int32_t* const positions =
        whole ? reinterpret_cast<int32_t*>(scores + kScoreTokens * room_) : positions_ + item.kept;
    const int32_t room = whole ? room_ : item.room;
    Candidates candidates[kScoreTokens];
    for (int64_t t = 0; t < group.tokens; ++t)
      candidates[t].scores = scores + t * room, candidates[t].positions = positions + t * room;

    for (int64_t at = item.begin; at < item.end; at += kTilePositions) {
      const auto begin = static_cast<int32_t>(at);
      const auto end = static_cast<int32_t>(std::min<int64_t>(item.end, at + kTilePositions));
      kernel.score(p_, {group.token, group.tokens, begin, end, tile, kTilePositions}, memory);
      for (int32_t t = 0; t < group.tokens; ++t) {
        const int64_t token = group.token + t;
        const int32_t many = std::min(end, scored(token)) - begin;
        if (many <= 0) continue;
        const float* found = tile + t * kTilePositions;
        if (takes_all(token)) {
          std::copy(found, found + many, p_.chosen_scores + token * p_.chosen_score_token + begin);
          continue;
        }
        if (candidates[t].count + many > room) candidates[t].keep_best(p_.topk, selecting);
        candidates[t].add(found, begin, many);
      }
    }

    for (int32_t t = 0; t < group.tokens; ++t) {
      if (!whole) {
        found_[item.counts + t] = candidates[t].count;
      } else if (!takes_all(group.token + t)) {
        write_best(group.token + t, candidates[t], selecting);
      }
    }
  }

  // Selects among the candidates of a group's splits.
  void combine(const Group& group) {
    thread_local KeptBuffer buffer, selecting;
    int64_t room = 0;
    for (int32_t split = 0; split < group.splits; ++split) room += items_[group.item + split].room;
    auto* const memory = static_cast<float*>(buffer.get(room * (sizeof(float) + sizeof(int32_t))));
    for (int32_t t = 0; t < group.tokens; ++t) {
      if (takes_all(group.token + t)) continue;
      Candidates all{memory, reinterpret_cast<int32_t*>(memory + room)};
      for (int32_t split = 0; split < group.splits; ++split) {
        const Item& item = items_[group.item + split];
        const int64_t from = item.kept + int64_t{t} * item.room;
        const int32_t count = found_[item.counts + t];
        std::copy(scores_ + from, scores_ + from + count, all.scores + all.count);
        std::copy(positions_ + from, positions_ + from + count, all.positions + all.count);
        all.count += count;
      }
      write_best(group.token + t, all, selecting);
    }
  }

  void write_best(int64_t token, const Candidates& from, KeptBuffer& selecting) {
    int32_t* const chosen = p_.chosen + token * p_.chosen_token;
    float* const scores = p_.chosen_scores ? p_.chosen_scores + token * p_.chosen_score_token : nullptr;
    const auto take = [&](int32_t n, int32_t i) {
      chosen[n] = p_.position_at(token, from.positions[i]);
      if (scores) scores[n] = from.scores[i];
    };
    int32_t count = from.count;
    if (count > p_.topk)
      count = take_best(from.scores, count, p_.topk, kth_largest(from.scores, count, p_.topk, selecting), take);
    else
      for (int32_t i = 0; i < count; ++i) take(i, i);
    finish(token, count);
  }

  void take_all(int64_t token) {
    const int32_t count = std::max(p_.length[token], 0);
    std::iota(p_.chosen + token * p_.chosen_token, p_.chosen + token * p_.chosen_token + count, 0);
    finish(token, count);
  }

  // Makes slots of the chosen positions, and fills what lies behind them.
  void finish(int64_t token, int32_t count) {
    int32_t* const chosen = p_.chosen + token * p_.chosen_token;
    for (int32_t i = 0; p_.slots.block_size > 0 && i < count; ++i)
      chosen[i] = slot_of_position(p_.slots, p_.request[token], chosen[i]);
    std::fill(chosen + count, chosen + p_.topk, -1);
    if (!p_.chosen_scores) return;
    float* const scores = p_.chosen_scores + token * p_.chosen_score_token;
    std::fill(scores + count, scores + p_.topk, -__builtin_inff());
  }

  const SelectTokensProblem& p_;
  const int32_t room_ = 2 * (p_.topk + kTilePositions);  // twice what stays and comes, so that selecting is rare
  bool some_take_all_ = false;
  std::vector<Group> groups_;
  std::vector<int64_t> split_;  // groups with several splits
  std::vector<Item> items_;
  int64_t kept_ = 0, counts_ = 0;
  float* scores_ = nullptr;  // of all kept candidates
  int32_t* positions_ = nullptr;
  int32_t* found_ = nullptr;
};

}  // namespace

int64_t select_workspace_bytes(const SelectTokensProblem&) { return 0; }  // threads keep their own memory

void select_tokens(const SelectTokensProblem& p) { Selection(p).run(); }

}  // namespace mla::cpu

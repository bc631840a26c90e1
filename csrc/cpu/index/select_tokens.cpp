// Scores keys and selects among them without keeping all scores. A thread scores a tile of neighbouring tokens of one
// request, and adds what exceeds a token's k-th best so far to its candidates. When these have no room, the best k
// stay. Where tokens are few, their contexts are split, and the splits' candidates are selected from again.
#include <algorithm>
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
  uint32_t worst = kNothing;  // later scores have to exceed it

  // The scores of positions from `first` on.
  void add(const float* from, int32_t first, int32_t many) {
    for (int32_t i = 0; i < many; ++i) {
      scores[count] = from[i], positions[count] = first + i;
      count += ordered(from[i]) > worst;
    }
  }

  void keep_best(int32_t k, KeptBuffer& buffer) {
    if (count <= k) return;
    count = take_best(scores, count, k, buffer, worst,
                      [this](int32_t n, int32_t i) { scores[n] = scores[i], positions[n] = positions[i]; });
  }
};

// Neighbouring tokens of one request, and splits of their contexts.
struct Group {
  int64_t token;
  int32_t tokens;
  int64_t item;  // the first of its items, one a split
  int32_t splits;
};

// A split of a group. If it is not the only one, its tokens' candidates are saved from `saved` on, at most `room` of
// each, and their numbers from `counts` on.
struct Item {
  int64_t group;
  int32_t begin, end;
  int64_t saved, counts;
  int32_t room;
};

class Selection {
 public:
  explicit Selection(const SelectTokensProblem& p) : p_(p) { divide(); }

  void run() {
    thread_local KeptBuffer buffer;
    saved_scores_ = static_cast<float*>(buffer.get(saved_ * (sizeof(float) + sizeof(int32_t)) + counts_ * 4));
    saved_positions_ = reinterpret_cast<int32_t*>(saved_scores_ + saved_);
    saved_counts_ = saved_positions_ + saved_;
    for_each(static_cast<int64_t>(items_.size()), [&](int64_t item) { score(items_[item]); });
    for_each(static_cast<int64_t>(split_.size()), [&](int64_t i) { combine(groups_[split_[i]]); });
    if (some_take_all_ || p_.positions == 0)
      for_each_in_ranges(p_.tokens, 8, [&](int64_t token) {
        if (takes_all(token))
          take_all(token);
        else if (p_.positions == 0)
          fill(token, 0);
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
    const int64_t share = std::max<int64_t>(1, work / (kItemsPerThread * thread_count()));
    for (int64_t token = 0; token < p_.tokens;) {
      const int64_t first = token;
      int32_t longest = 0;
      // the more tokens share a key, the less often it is converted
      do longest = std::max(longest, scored(token++));
      while (token < p_.tokens && token - first < kScoreTokens && p_.request[token] == p_.request[first]);
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
      const int32_t room = splits > 1 ? std::min(end - static_cast<int32_t>(begin), p_.topk) : 0;
      items_.push_back({group, static_cast<int32_t>(begin), end, saved_, counts_, room});
      saved_ += int64_t{room} * tokens;
      if (splits > 1) counts_ += tokens;
    }
  }

  void score(const Item& item) {
    thread_local KeptBuffer kept, selecting;
    const IndexKernel& kernel = *active_kernels().index;
    const Group& group = groups_[item.group];
    const int64_t room = 2 * (int64_t{p_.topk} + kTilePositions);  // twice what stays and comes: selecting is rare
    const size_t kernel_bytes = (kernel.workspace_bytes + 63) / 64 * 64;
    auto* const memory = static_cast<uint8_t*>(kept.get(
        kernel_bytes + kScoreTokens * (kTilePositions * sizeof(float) + room * (sizeof(float) + sizeof(int32_t)))));
    auto* const tile = reinterpret_cast<float*>(memory + kernel_bytes);
    Candidates candidates[kScoreTokens];
    for (int32_t t = 0; t < group.tokens; ++t) {
      candidates[t].scores = tile + kScoreTokens * kTilePositions + t * room;
      candidates[t].positions = reinterpret_cast<int32_t*>(tile + kScoreTokens * (kTilePositions + room)) + t * room;
    }

    for (int64_t at = item.begin; at < item.end; at += kTilePositions) {
      const auto begin = static_cast<int32_t>(at);
      const auto end = static_cast<int32_t>(std::min<int64_t>(item.end, at + kTilePositions));
      kernel.score(p_, {group.token, group.tokens, begin, end, tile, kTilePositions}, memory);
      for (int32_t t = 0; t < group.tokens; ++t) {
        const int64_t token = group.token + t;
        const int32_t many = std::min(end, scored(token)) - begin;
        if (many <= 0) continue;
        const float* scores = tile + t * kTilePositions;
        if (takes_all(token)) {
          std::copy(scores, scores + many, p_.chosen_scores + token * p_.chosen_score_token + begin);
          continue;
        }
        if (candidates[t].count + many > room) candidates[t].keep_best(p_.topk, selecting);
        candidates[t].add(scores, begin, many);
      }
    }

    for (int32_t t = 0; t < group.tokens; ++t) {
      const int64_t token = group.token + t;
      Candidates& own = candidates[t];
      own.keep_best(p_.topk, selecting);
      if (group.splits > 1) {
        const int64_t to = item.saved + int64_t{t} * item.room;
        std::copy(own.scores, own.scores + own.count, saved_scores_ + to);
        std::copy(own.positions, own.positions + own.count, saved_positions_ + to);
        saved_counts_[item.counts + t] = own.count;
      } else if (!takes_all(token)) {
        write(token, own);
      }
    }
  }

  // Selects among the candidates of a group's splits.
  void combine(const Group& group) {
    thread_local KeptBuffer kept, selecting;
    int64_t room = 0;
    for (int32_t split = 0; split < group.splits; ++split) room += items_[group.item + split].room;
    auto* const memory = static_cast<float*>(kept.get(room * (sizeof(float) + sizeof(int32_t))));
    for (int32_t t = 0; t < group.tokens; ++t) {
      if (takes_all(group.token + t)) continue;
      Candidates all{memory, reinterpret_cast<int32_t*>(memory + room)};
      for (int32_t split = 0; split < group.splits; ++split) {
        const Item& item = items_[group.item + split];
        const int64_t from = item.saved + int64_t{t} * item.room;
        const int32_t count = saved_counts_[item.counts + t];
        std::copy(saved_scores_ + from, saved_scores_ + from + count, all.scores + all.count);
        std::copy(saved_positions_ + from, saved_positions_ + from + count, all.positions + all.count);
        all.count += count;
      }
      all.keep_best(p_.topk, selecting);
      write(group.token + t, all);
    }
  }

  int32_t place(int64_t token, int32_t position) const {
    return p_.slots.block_size > 0 ? slot_of_position(p_.slots, p_.request[token], position) : position;
  }

  void write(int64_t token, const Candidates& best) {
    int32_t* const chosen = p_.chosen + token * p_.chosen_token;
    for (int32_t i = 0; i < best.count; ++i) chosen[i] = place(token, best.positions[i]);
    if (p_.chosen_scores)
      std::copy(best.scores, best.scores + best.count, p_.chosen_scores + token * p_.chosen_score_token);
    fill(token, best.count);
  }

  void take_all(int64_t token) {
    int32_t* const chosen = p_.chosen + token * p_.chosen_token;
    const int32_t count = std::max(p_.length[token], 0);
    for (int32_t i = 0; i < count; ++i) chosen[i] = place(token, i);
    fill(token, count);
  }

  // What lies behind the chosen.
  void fill(int64_t token, int32_t count) {
    int32_t* const chosen = p_.chosen + token * p_.chosen_token;
    std::fill(chosen + count, chosen + p_.topk, -1);
    if (!p_.chosen_scores) return;
    float* const scores = p_.chosen_scores + token * p_.chosen_score_token;
    std::fill(scores + count, scores + p_.topk, -__builtin_inff());
  }

  const SelectTokensProblem& p_;
  bool some_take_all_ = false;
  std::vector<Group> groups_;
  std::vector<int64_t> split_;  // groups with several splits
  std::vector<Item> items_;
  int64_t saved_ = 0, counts_ = 0;
  float* saved_scores_ = nullptr;
  int32_t* saved_positions_ = nullptr;
  int32_t* saved_counts_ = nullptr;
};

}  // namespace

int64_t select_workspace_bytes(const SelectTokensProblem&) { return 0; }  // threads keep their own memory

void select_tokens(const SelectTokensProblem& p) { Selection(p).run(); }

}  // namespace mla::cpu

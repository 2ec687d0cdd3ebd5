// SPDX-License-Identifier: Apache-2.0
// Without gradients the forward's tiles of 512 rows may be grouped into units: 8 tiles of the same
// rows, computed one after the other by one cluster, which stores one sum per row and its
// reference. The units of the last round and the tiles after a row cluster's last whole unit would
// leave clusters idle, so they are done a tile at a time; these single tiles have own sums, which
// finish_rows combines into units. A unit's tiles are combined in the same order either way
// (units.cuh), so that neither the schedule nor the batch changes a bit.
#pragma once

#include <algorithm>

#include "src/host_device.h"

namespace logitless::cuda {

constexpr int unit_rows = 512, unit_tiles = 8;
// Row clusters whose units run side by side.
constexpr int unit_group = 4;

// Tiles [tile, end) of a row cluster. `single` is the index among the single tiles, or -1 for a
// unit.
struct UnitItem {
  int row_cluster, tile, end, single;
};

struct Units {
  int row_clusters, column_tiles;
  int width;  // tiles per unit; 1: every tile is a unit, none is single
  // A row cluster has `full` complete units, and `over` tiles after them.
  int full, over;
  // `whole` of the full units are done as units; after them, `rest` of them a tile at a time.
  int whole, rest;
  int items;

  LOGITLESS_HOST_DEVICE static Units make(int row_clusters, int column_tiles, int width,
                                          int clusters) {
    Units u{};
    u.row_clusters = row_clusters, u.column_tiles = column_tiles, u.width = width;
    u.full = column_tiles / width, u.over = column_tiles % width;
    const int units = row_clusters * u.full;
    u.rest = width == 1 ? 0 : units % clusters;
    u.whole = units - u.rest;
    u.items = u.whole + u.singles();
    return u;
  }
  LOGITLESS_HOST_DEVICE int singles() const { return rest * width + row_clusters * over; }

  // The number of units of a row cluster.
  LOGITLESS_HOST_DEVICE int columns() const { return full + (over > 0); }

  // Returns the n-th full unit: rows vary fastest, in groups, then the columns.
  LOGITLESS_HOST_DEVICE UnitItem unit(int n) const {
    const int group = n / (unit_group * full), first = group * unit_group;
    const int rows = row_clusters - first < unit_group ? row_clusters - first : unit_group;
    const int left = n - first * full, tile = left / rows * width;
    return {first + left % rows, tile, tile + width, -1};
  }
  LOGITLESS_HOST_DEVICE int number(int row_cluster, int unit) const {
    const int first = row_cluster / unit_group * unit_group;
    const int rows = row_clusters - first < unit_group ? row_clusters - first : unit_group;
    return first * full + unit * rows + row_cluster - first;
  }
  LOGITLESS_HOST_DEVICE UnitItem item(int n) const {
    if (n < whole) return unit(n);
    const int s = n - whole;
    if (s < rest * width) {
      const UnitItem of = unit(whole + rest - 1 - s % rest);
      const int tile = of.tile + s / rest;
      return {of.row_cluster, tile, tile + 1, s};
    }
    const int behind = s - rest * width, tile = full * width + behind / row_clusters;
    return {row_clusters - 1 - behind % row_clusters, tile, tile + 1, s};
  }
  // The index of a unit's j-th tile among the single tiles; negative if the unit is done as a unit.
  LOGITLESS_HOST_DEVICE int single(int row_cluster, int unit, int j) const {
    if (unit >= full) return rest * width + (j + 1) * row_clusters - 1 - row_cluster;
    const int n = number(row_cluster, unit) - whole;
    return n < 0 ? -1 : (j + 1) * rest - 1 - n;
  }
  // The first unit of a row cluster that is done tile by tile, as are all after it.
  LOGITLESS_HOST_DEVICE int first_single(int row_cluster) const {
    const int first = row_cluster / unit_group * unit_group;
    const int rows = row_clusters - first < unit_group ? row_clusters - first : unit_group;
    const int before = whole - (first * full + row_cluster - first);
    const int unit = before <= 0 ? 0 : (before + rows - 1) / rows;
    return unit < full ? unit : full;
  }
};

// The most single tiles for any number of row clusters up to this one: the host does not know how
// many tokens count.
inline int most_singles(int row_clusters, int column_tiles, int clusters) {
  int most = 0;
  for (int rows = row_clusters; rows > 0 && rows > row_clusters - clusters; --rows) {
    most = std::max(most, Units::make(rows, column_tiles, unit_tiles, clusters).singles());
  }
  return most;
}

}  // namespace logitless::cuda

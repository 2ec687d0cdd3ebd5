# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over the ranks of a group, or into blocks.

given      Split, as a caller passes it     placed     the Split that DTensors' placements mean
shards     which columns a rank has         exchange   collectives, and errors that are shared
blocks     a rank's calls on its columns    combine    results from the ranks' states
sums       additions in a fixed order       ranks      the checks of LOGITLESS_CHECK_RANKS=1
rule       the loss and its autograd rule   divergence the divergence and its autograd rule
depends    results that a compiler must not detach from exchanged inputs
"""

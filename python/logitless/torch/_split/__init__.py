# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over the ranks of a group, or into blocks.

given      Split, as a caller says it       placed     and as the placements of DTensors do
shards     where a rank's columns lie       exchange   collectives, and errors that are told
blocks     what a rank makes of them        combine    what the ranks' states come to
sums       additions in a fixed order       ranks      LOGITLESS_CHECK_RANKS=1
rule       the loss and its autograd rule
"""

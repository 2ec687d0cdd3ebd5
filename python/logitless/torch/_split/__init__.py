# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over the ranks of a group, or into blocks.

given      Split, as a caller passes it     placed     and as DTensors' placements give it
shards     where a rank's columns lie       exchange   collectives, and errors that are shared
blocks     what a rank makes of them        combine    results from the ranks' states
sums       additions in a fixed order       ranks      LOGITLESS_CHECK_RANKS=1
rule       the loss and its autograd rule      divergence the same of two heads
"""

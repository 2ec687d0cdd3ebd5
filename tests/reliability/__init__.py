# SPDX-License-Identifier: Apache-2.0
"""What scripts/reliability tries, one module a kind, each part a function that returns rows of the
page. No figure is written down here: every one comes from a run of this invocation, or from the
file that make reliability-device left."""

# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless report`: whether the library is right and fast on this machine."""

# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless report`: checks that the library is right and fast on this machine."""

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# compile_and_log.sh COMPILER [OPTION...] -o OBJECT ...: runs the compiler, and keeps what it said in OBJECT.log, where a test
# reads what ptxas reports of each kernel. Shows it only when the compiler fails, for it has a line for every kernel.
object=
previous=
for argument in "$@"; do
  if [ "$previous" = -o ]; then object=$argument; fi
  previous=$argument
done
"$@" >"$object.log" 2>&1 && exit 0
code=$?
cat "$object.log" >&2
exit $code

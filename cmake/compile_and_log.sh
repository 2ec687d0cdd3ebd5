#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# compile_and_log.sh COMPILER [OPTION...] -o OBJECT ...: runs the compiler and writes its messages to OBJECT.log, where a test
# reads what ptxas reports of each kernel. Prints the log only if the compiler fails, because it has lines for every kernel.
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

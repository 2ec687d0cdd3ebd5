#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Arguments: SOURCES LIBDIR CC CXX. Compiles the consumers with only pkg-config's flags, shared and
# static, and every header on its own.
set -eu
sources=$1 libdir=$2 cc=$3 cxx=$4
export PKG_CONFIG_PATH="$libdir/pkgconfig" LD_LIBRARY_PATH="$libdir"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
flags=$(pkg-config --cflags logitless)
strict="-Wall -Wextra -Wpedantic -Werror"

$cxx -std=c++20 $flags "$sources/cpp/main.cpp" -o "$out/cpp" $(pkg-config --libs logitless)
"$out/cpp"
$cc -std=c11 $flags "$sources/c/main.c" -o "$out/c" $(pkg-config --libs logitless) -lm
"$out/c"
$cc -std=c11 $flags "$sources/c/main.c" -o "$out/static" $(pkg-config --static --libs logitless | sed 's/-llogitless/-l:liblogitless.a/')
LD_LIBRARY_PATH= "$out/static"
for header in $(cd "$(pkg-config --variable=includedir logitless)" && echo logitless/*.h); do
  echo "#include <$header>" | $cxx -std=c++20 $strict $flags -fsyntax-only -x c++ -
  [ "$header" = logitless/c.h ] && continue
  # With an older C++ standard the first error says what is needed.
  if echo "#include <$header>" | $cxx -std=c++17 $flags -fsyntax-only -x c++ - 2>"$out/errors"; then exit 1; fi
  grep -m 1 "error:" "$out/errors" | grep -q "need C++20" || { cat "$out/errors"; exit 1; }
done
echo "#include <logitless/c.h>" | $cxx -std=c++11 $flags -fsyntax-only -x c++ -
echo "#include <logitless/c.h>" | $cc -std=c11 $strict $flags -fsyntax-only -x c -

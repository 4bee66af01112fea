#!/usr/bin/env bash
# Puts mlir-opt, mlir-translate, opt and llc 19 (the LLVM that Huawei's compiler is built on) under a folder, from
# Debian's packages. Nothing is installed on the machine, and root is not needed.
#
# usage: packaging/ascend-llvm.sh FOLDER      makes FOLDER/usr/lib/llvm-19
set -euo pipefail
folder=$(realpath -m "$1")
packages=(mlir-19-tools llvm-19 libllvm19 libmlir-19 llvm-19-linker-tools)

for tool in apt-get dpkg-deb gcc; do
  command -v "$tool" > /dev/null || { echo "make ascend needs $tool: run it on Debian 12 or later, or Ubuntu 24.10 or later" >&2; exit 1; }
done
rm -rf "$folder"
mkdir -p "$folder/packages"
cd "$folder/packages"
apt-get -q download "${packages[@]}" || { apt-get -q update && apt-get -q download "${packages[@]}"; } || {
  echo "make ascend needs the Debian packages ${packages[*]}, and apt-get could not download them" >&2
  exit 1
}
for package in *.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$folder" --wildcards --no-wildcards-match-slash \
    './usr/lib/*/*.so*' './usr/lib/llvm-19/lib/*.so*' './usr/lib/llvm-19/bin/mlir-opt' \
    './usr/lib/llvm-19/bin/mlir-translate' './usr/lib/llvm-19/bin/opt' './usr/lib/llvm-19/bin/llc' 2> /dev/null || true
done
cd "$folder"
rm -rf packages
for tool in mlir-opt mlir-translate opt llc; do
  LD_LIBRARY_PATH=usr/lib/llvm-19/lib:$(echo usr/lib/*-linux-gnu) "usr/lib/llvm-19/bin/$tool" --version > /dev/null || {
    echo "$tool of the Debian packages does not run" >&2
    exit 1
  }
done

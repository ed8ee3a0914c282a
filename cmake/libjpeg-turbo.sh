#!/bin/sh
# Builds libjpeg-turbo for wheels, as a static library: the images that wheels are built in have
# versions before 2.1, or none. Run once in each by cibuildwheel (pyproject.toml).
set -eu
version=3.1.4.1
sha256=ecae8008e2cc9ade2f2c1bb9d5e6d4fb73e7c433866a056bd82980741571a022
site=https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download
if [ "$(uname -m)" = x86_64 ]; then # for SIMD; NEON needs no assembler
  { command -v dnf && dnf install -y -q nasm; } || { command -v apk && apk add -q nasm; } || yum install -y -q nasm
fi
folder=$(mktemp -d)
cd "$folder"
curl -fsSL -o source.tar.gz "$site/$version/libjpeg-turbo-$version.tar.gz"
echo "$sha256  source.tar.gz" | sha256sum -c -
tar xzf source.tar.gz --strip-components=1
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DENABLE_SHARED=OFF -DWITH_TURBOJPEG=OFF -DREQUIRE_SIMD=ON \
  -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_INSTALL_PREFIX=/usr/local -DCMAKE_INSTALL_LIBDIR:PATH=lib
cmake --build build --parallel
cmake --install build
install -m 644 src/jpegint.h /usr/local/include/ # for its Huffman decoder, which ours replaces
rm -rf "$folder"

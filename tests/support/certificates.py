"""A CA of our own and what it signs, made with the program openssl."""

import ssl
import subprocess


class Authority:
    """Signs certificates for 127.0.0.1 and localhost."""

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "ca.pem"
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        self._new("/CN=ours", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")

    def _new(self, name, *words):
        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")
        self._openssl(*new, name, *words)

    def _openssl(self, *words):
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    def sign(self, name):
        """The files of a new certificate and of its key."""
        self._new(f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        request = ("x509", "-req", "-in", f"{name}.csr")
        self._openssl(*request, *signed, "-days", "2", "-out", f"{name}.pem")
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def lock(self, key):
        """The same key, with a password."""
        locked = key.with_suffix(".locked")
        words = ("-aes256", "-passout", "pass:sesame")
        self._openssl("pkey", "-in", str(key), "-out", str(locked), *words)
        return locked

    def client(self):
        """The context of a client that trusts this authority and no other."""
        return ssl.create_default_context(cafile=str(self.file))

//! Encryption of a backup with a passphrase.
//!
//! ```text
//! magic, salt, iterations      key: PBKDF2-HMAC-SHA256 of the passphrase
//! length, chunk, tag ...       ChaCha20-Poly1305; the nonce has the number of the chunk and marks the last one
//! ```
//!
//! The numbers make an exchanged, repeated or removed chunk detectable, the mark a truncated file (the STREAM construction).
//! `ring` has the primitives; formats of other tools would need their programs for a restoration, or many dependencies.

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::pbkdf2;
use std::io::{self, ErrorKind, Read, Write};
use std::num::NonZeroU32;

/// First bytes of an encrypted backup.
pub(super) const MAGIC: &[u8] = b"MERIDIAN-BACKUP-1\n";
/// Bytes of the salt.
const SALT_BYTES: usize = 16;
/// Iterations for a new backup: OWASP's minimum for PBKDF2-HMAC-SHA256 (2023). It delays each guess by about 0.2 s.
const ITERATIONS: u32 = 600_000;
/// Maximum iterations of a backup that is read, so that a forged one does not occupy the processor for hours.
const ITERATIONS_MAX: u32 = 10_000_000;
/// Bytes of a chunk before encryption.
const CHUNK_BYTES: usize = 1 << 20;
/// Minimum bytes of a passphrase.
const PASSPHRASE_BYTES_MIN: usize = 12;

/// Passphrase of a backup. It is never printed.
pub(super) struct Passphrase(String);

impl Passphrase {
    /// Reads a passphrase from the content of a file or variable.
    pub(super) fn read(text: &str) -> Result<Passphrase, String> {
        let text = text.trim_end_matches(['\n', '\r']);
        if text.len() < PASSPHRASE_BYTES_MIN {
            return Err(format!(
                "has {} bytes; a passphrase needs at least {PASSPHRASE_BYTES_MIN}, such as `openssl rand -hex 16` makes",
                text.len()
            ));
        }
        Ok(Passphrase(text.to_owned()))
    }

    fn key(&self, salt: &[u8], iterations: u32) -> io::Result<LessSafeKey> {
        let iterations = NonZeroU32::new(iterations).filter(|it| it.get() <= ITERATIONS_MAX);
        let iterations = iterations.ok_or_else(|| invalid("its header is damaged"))?;
        let mut key = [0; 32];
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, iterations, salt, self.0.as_bytes(), &mut key);
        let key = UnboundKey::new(&CHACHA20_POLY1305, &key).map_err(|_| invalid("its key is invalid"))?;
        Ok(LessSafeKey::new(key))
    }
}

fn invalid(problem: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the backup cannot be decrypted: {problem}"))
}

fn nonce(number: u64, is_last: bool) -> Nonce {
    let mut bytes = [0; 12];
    bytes[0] = is_last.into();
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Writer that encrypts.
pub(super) struct SealingWriter<W> {
    to: W,
    key: LessSafeKey,
    number: u64,
    chunk: Vec<u8>,
}

impl<W: Write> SealingWriter<W> {
    /// Writes the header.
    pub(super) fn new(
        mut to: W,
        passphrase: &Passphrase,
        salt: [u8; SALT_BYTES],
    ) -> io::Result<SealingWriter<W>> {
        to.write_all(MAGIC)?;
        to.write_all(&salt)?;
        to.write_all(&ITERATIONS.to_be_bytes())?;
        let key = passphrase.key(&salt, ITERATIONS)?;
        Ok(SealingWriter { to, key, number: 0, chunk: Vec::with_capacity(CHUNK_BYTES) })
    }

    fn seal(&mut self, is_last: bool) -> io::Result<()> {
        let mut chunk = std::mem::take(&mut self.chunk);
        self.key
            .seal_in_place_append_tag(nonce(self.number, is_last), Aad::from(MAGIC), &mut chunk)
            .map_err(|_| io::Error::other("encryption failed"))?;
        let length = u32::try_from(chunk.len()).map_err(io::Error::other)?;
        self.to.write_all(&length.to_be_bytes())?;
        self.to.write_all(&chunk)?;
        self.number += 1;
        chunk.clear();
        self.chunk = chunk;
        Ok(())
    }

    /// Writes the last chunk; without it, the file is truncated.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.seal(true)?;
        Ok(self.to)
    }
}

impl<W: Write> Write for SealingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.chunk.len() == CHUNK_BYTES {
            self.seal(false)?;
        }
        let taken = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Reader that decrypts. It returns only what has been authenticated.
pub(super) struct OpeningReader<R> {
    from: R,
    key: LessSafeKey,
    number: u64,
    chunk: Vec<u8>,
    at: usize,
    is_done: bool,
}

impl<R: Read> OpeningReader<R> {
    /// Reads the header after the magic bytes.
    pub(super) fn new(mut from: R, passphrase: &Passphrase) -> io::Result<OpeningReader<R>> {
        let (mut salt, mut iterations) = ([0; SALT_BYTES], [0; 4]);
        from.read_exact(&mut salt)
            .and_then(|()| from.read_exact(&mut iterations))
            .map_err(|_| truncated())?;
        let key = passphrase.key(&salt, u32::from_be_bytes(iterations))?;
        Ok(OpeningReader { from, key, number: 0, chunk: Vec::new(), at: 0, is_done: false })
    }

    fn open(&mut self) -> io::Result<()> {
        let mut length = [0; 4];
        self.from.read_exact(&mut length).map_err(|_| truncated())?;
        let length = u32::from_be_bytes(length) as usize;
        if length > CHUNK_BYTES + CHACHA20_POLY1305.tag_len() {
            return Err(wrong());
        }
        let mut sealed = vec![0; length];
        self.from.read_exact(&mut sealed).map_err(|_| truncated())?;
        for is_last in [false, true] {
            let mut chunk = sealed.clone();
            if let Ok(open) =
                self.key.open_in_place(nonce(self.number, is_last), Aad::from(MAGIC), &mut chunk)
            {
                let length = open.len();
                chunk.truncate(length);
                (self.chunk, self.at, self.is_done) = (chunk, 0, is_last);
                self.number += 1;
                return Ok(());
            }
        }
        Err(wrong())
    }
}

fn truncated() -> io::Error {
    invalid("it is truncated; use a complete copy")
}

fn wrong() -> io::Error {
    invalid("the passphrase is wrong, or the file is damaged")
}

impl<R: Read> Read for OpeningReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.chunk.len() {
            if self.is_done {
                return Ok(0);
            }
            self.open()?;
        }
        let taken = into.len().min(self.chunk.len() - self.at);
        into[..taken].copy_from_slice(&self.chunk[self.at..self.at + taken]);
        self.at += taken;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "correct horse battery staple\n";

    fn sealed(content: &[u8]) -> Vec<u8> {
        let passphrase = Passphrase::read(TEXT).expect("long enough");
        let mut writer = SealingWriter::new(Vec::new(), &passphrase, [7; SALT_BYTES]).expect("a vector");
        writer.write_all(content).expect("a vector");
        writer.finish().expect("a vector")
    }

    fn opened(sealed: &[u8], passphrase: &str) -> io::Result<Vec<u8>> {
        let passphrase = Passphrase::read(passphrase).expect("long enough");
        let body = sealed.strip_prefix(MAGIC).expect("the magic bytes");
        let mut content = Vec::new();
        OpeningReader::new(body, &passphrase)?.read_to_end(&mut content)?;
        Ok(content)
    }

    #[test]
    fn a_backup_is_decrypted_with_its_passphrase_only_and_damage_is_detected() {
        let content: Vec<u8> = (0..2 * CHUNK_BYTES + 1).map(|at| (at % 251) as u8).collect();
        let whole = sealed(&content);
        assert!(opened(&whole, TEXT).expect("it is intact") == content);
        assert!(
            opened(&whole, "another passphrase").is_err_and(|error| error.to_string().contains("passphrase"))
        );
        let header = MAGIC.len() + SALT_BYTES + 4;
        let chunk = CHUNK_BYTES + 16 + 4;
        // Whole chunks are missing, exchanged or repeated.
        for (parts, problem) in [
            (vec![0, 1], "truncated"),
            (vec![1, 0, 2], "damaged"),
            (vec![0, 0, 1, 2], "damaged"),
            (vec![0, 2], "damaged"),
        ] {
            let mut changed = whole[..header].to_vec();
            for part in parts {
                let begin = header + part * chunk;
                changed.extend_from_slice(&whole[begin..whole.len().min(begin + chunk)]);
            }
            let error = opened(&changed, TEXT).expect_err("it is changed").to_string();
            assert!(error.contains(problem), "{error}");
        }
        for at in [MAGIC.len(), header, header + 4, whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(opened(&changed, TEXT).is_err(), "byte {at}");
        }
        assert!(
            opened(&whole[..whole.len() - 1], TEXT)
                .is_err_and(|error| error.to_string().contains("truncated"))
        );
    }

    #[test]
    fn an_empty_backup_is_read_back_and_a_short_passphrase_is_rejected() {
        assert_eq!(opened(&sealed(b""), TEXT).expect("it is intact"), b"");
        assert!(Passphrase::read("short\n").is_err_and(|problem| problem.contains("5 bytes")));
        assert!(Passphrase::read(&"a".repeat(PASSPHRASE_BYTES_MIN)).is_ok());
    }
}

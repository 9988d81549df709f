//! Public keys of an issuer: a JSON Web Key Set (RFC 7517, 7518 §6, 8037 §2).
//!
//! A set may hold keys for other purposes (encryption, unsupported curves); they are skipped, as RFC 7517 §5 demands,
//! and a set without any usable key is rejected. A usable key that is malformed is a mistake to report, and so is a
//! shared secret in a file that is meant to be published.

use super::Algorithm;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value;

/// Maximum size of the file; a key has less than 2 KiB.
pub const JWKS_BYTES_MAX: usize = 256 << 10;
/// Maximum keys of a set: an issuer that changes them daily and keeps each for two months.
pub const KEYS_MAX: usize = 64;
/// Minimum and maximum bytes of an RSA modulus: 2048 bits, which RFC 7518 §3.3 demands, and 8192.
const RSA_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicKey {
    /// For RS256: modulus and exponent, big endian, without leading zeros.
    Rsa {
        /// The modulus.
        n: Vec<u8>,
        /// The exponent.
        e: Vec<u8>,
    },
    /// For ES256: an uncompressed point (SEC 1 §2.3.3).
    P256(Vec<u8>),
    /// For EdDSA.
    Ed25519(Vec<u8>),
}

impl PublicKey {
    /// Returns the only algorithm of this key.
    pub fn algorithm(&self) -> Algorithm {
        match self {
            PublicKey::Rsa { .. } => Algorithm::Rs256,
            PublicKey::P256(_) => Algorithm::Es256,
            PublicKey::Ed25519(_) => Algorithm::EdDsa,
        }
    }
}

/// Key and its identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedKey {
    /// `kid`.
    pub kid: Option<String>,
    /// The key.
    pub key: PublicKey,
}

/// Parses a key set.
///
/// # Errors
///
/// The mistake, with the index of the key.
pub fn read(json: &[u8]) -> Result<Vec<NamedKey>, String> {
    if json.len() > JWKS_BYTES_MAX {
        return Err(format!("it has {} bytes; the maximum is {JWKS_BYTES_MAX}", json.len()));
    }
    let set: Value = serde_json::from_slice(json).map_err(|error| format!("it is not JSON: {error}"))?;
    let keys = set.get("keys").and_then(Value::as_array).ok_or("it has no list \"keys\"")?;
    if keys.len() > KEYS_MAX {
        return Err(format!("it has {} keys; the maximum is {KEYS_MAX}", keys.len()));
    }
    let mut read: Vec<NamedKey> = Vec::new();
    for (index, jwk) in keys.iter().enumerate() {
        let named = named(jwk).map_err(|problem| format!("keys[{index}]: {problem}"))?;
        let Some(named) = named else { continue };
        let twin = |other: &NamedKey| {
            other.kid == named.kid && other.key.algorithm() == named.key.algorithm() && other.key != named.key
        };
        if named.kid.is_some() && read.iter().any(twin) {
            return Err(format!("keys[{index}]: two keys for one algorithm have the same \"kid\""));
        }
        read.push(named);
    }
    if read.is_empty() {
        return Err("it has no key for RS256, ES256 or EdDSA signatures".to_owned());
    }
    Ok(read)
}

/// Parses one key; `None` if it is for another purpose.
fn named(jwk: &Value) -> Result<Option<NamedKey>, String> {
    let text = |name: &str| jwk.get(name).and_then(Value::as_str);
    if text("use").is_some_and(|used| used != "sig") {
        return Ok(None);
    }
    let bytes = |name: &str| {
        let text = text(name).ok_or_else(|| format!("\"{name}\" is missing"))?;
        URL_SAFE_NO_PAD.decode(text).map_err(|_| format!("\"{name}\" is not base64url without padding"))
    };
    let coordinate = |name: &str| match bytes(name)? {
        bytes if bytes.len() == 32 => Ok(bytes),
        bytes => Err(format!("\"{name}\" has {} bytes and must have 32", bytes.len())),
    };
    let (key, alg) = match (text("kty"), text("crv")) {
        (Some("RSA"), _) => {
            let trimmed =
                |bytes: Vec<u8>| bytes.into_iter().skip_while(|byte| *byte == 0).collect::<Vec<_>>();
            let (n, e) = (trimmed(bytes("n")?), trimmed(bytes("e")?));
            if !RSA_BYTES.contains(&n.len()) {
                return Err(format!("its modulus has {} bits and must have 2048 to 8192", n.len() * 8));
            }
            (PublicKey::Rsa { n, e }, "RS256")
        }
        (Some("EC"), Some("P-256")) => {
            (PublicKey::P256([vec![4], coordinate("x")?, coordinate("y")?].concat()), "ES256")
        }
        (Some("OKP"), Some("Ed25519")) => (PublicKey::Ed25519(coordinate("x")?), "EdDSA"),
        (Some("oct"), _) => {
            return Err("it is a shared secret, which does not belong in a set of public keys; \
                        give it as secret_file"
                .to_owned());
        }
        (Some(_), _) => return Ok(None),
        (None, _) => return Err("\"kty\" is missing".to_owned()),
    };
    // The same key material under another algorithm (PS256, RS512) is for tokens that are not supported here.
    if text("alg").is_some_and(|given| given != alg) {
        return Ok(None);
    }
    Ok(Some(NamedKey { kid: text("kid").map(str::to_owned), key }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn encoded(bytes: usize) -> String {
        URL_SAFE_NO_PAD.encode(vec![7; bytes])
    }

    fn ec(kid: &str) -> Value {
        json!({"kty": "EC", "crv": "P-256", "kid": kid, "x": encoded(32), "y": encoded(32)})
    }

    fn rsa(bits: usize) -> Value {
        json!({"kty": "RSA", "n": encoded(bits / 8), "e": "AQAB"})
    }

    fn algorithms(keys: &[Value]) -> Result<Vec<Algorithm>, String> {
        let read = read(json!({"keys": keys}).to_string().as_bytes())?;
        Ok(read.into_iter().map(|named| named.key.algorithm()).collect())
    }

    #[test]
    fn signature_keys_are_used_and_others_are_skipped() {
        let with = |mut jwk: Value, name: &str, value: &str| {
            jwk[name] = json!(value);
            jwk
        };
        let ed = json!({"kty": "OKP", "crv": "Ed25519", "x": encoded(32)});
        let keys = [
            rsa(2048),
            ec("1"),
            ed.clone(),
            with(rsa(2048), "use", "enc"),
            with(rsa(2048), "alg", "PS256"),
            with(ec("1"), "crv", "P-384"),
            with(ed, "crv", "X25519"),
            json!({"kty": "AKP"}),
        ];
        assert_eq!(algorithms(&keys), Ok(vec![Algorithm::Rs256, Algorithm::Es256, Algorithm::EdDsa]));
    }

    #[test]
    fn an_invalid_set_is_rejected_with_the_index_of_the_key() {
        let check = |keys: &[Value], word: &str| {
            let problem = algorithms(keys).expect_err(word);
            assert!(problem.contains(word), "{word} in {problem}");
        };
        check(&[], "no key for");
        check(&[json!({"kty": "oct", "k": "c2VjcmV0"})], "secret_file");
        check(&[ec("1"), json!({"kid": "2"})], "keys[1]: \"kty\"");
        check(&[json!({"kty": "OKP", "crv": "Ed25519", "x": encoded(31)})], "31 bytes");
        check(&[json!({"kty": "OKP", "crv": "Ed25519", "x": "a+b="})], "base64url");
        check(&[rsa(2040)], "2040 bits");
        check(&[rsa(8200)], "8200 bits");
        let mut other = ec("1");
        other["x"] = json!(URL_SAFE_NO_PAD.encode([8; 32]));
        check(&[ec("1"), other], "the same \"kid\"");
        check(&vec![ec("1"); KEYS_MAX + 1], "65 keys");
        assert_eq!(algorithms(&vec![ec("1"); KEYS_MAX]).map(|keys| keys.len()), Ok(KEYS_MAX));
        assert!(read(b"{}").is_err() && read(b"[").is_err());
        assert!(read(&vec![b' '; JWKS_BYTES_MAX + 1]).expect_err("too large").contains("bytes"));
    }
}

//! Verification of signed tokens (JWT): the signatures, with ring, which TLS uses as well. [`jwt_core`] has the rest, which is
//! pure, and this crate exports it.

pub use jwt_core::*;

use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm};

use jwks::{NamedKey, PublicKey};

/// Verifies a signature with the keys of an issuer. A key is only used with its own algorithm, independent of the token.
///
/// # Errors
///
/// [`TokenProblem::Key`] unless exactly one key has the identifier and the algorithm of the token, and
/// [`TokenProblem::Signature`] if the signature is not that of the key.
pub fn verify(keys: &[NamedKey], token: &SignatureInput<'_>) -> Result<(), TokenProblem> {
    let SignatureInput { algorithm, kid, signed, signature } = *token;
    let mut matching = keys
        .iter()
        .filter(|named| named.key.algorithm() == algorithm && (kid.is_none() || named.kid.as_deref() == kid));
    let (Some(only), None) = (matching.next(), matching.next()) else {
        return Err(TokenProblem::Key);
    };
    let plain = |algorithm: &'static dyn VerificationAlgorithm, key: &[u8]| {
        UnparsedPublicKey::new(algorithm, key).verify(signed, signature)
    };
    let verified = match &only.key {
        PublicKey::Rsa { n, e } => {
            RsaPublicKeyComponents { n, e }.verify(&signature::RSA_PKCS1_2048_8192_SHA256, signed, signature)
        }
        PublicKey::P256(point) => plain(&signature::ECDSA_P256_SHA256_FIXED, point),
        PublicKey::Ed25519(key) => plain(&signature::ED25519, key),
    };
    verified.map_err(|_| TokenProblem::Signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

    /// Modulus of a key whose private half was discarded (its exponent is 65537), and a token signed with it: `RS256`,
    /// `kid` rsa, for the tenant `tokens`, until the year 2100.
    const RSA_MODULUS: &str = "\
        u3dJVPT7sB0dSI4RfSr4stTSw2sygTQYVz4LL85Pvm8KNMA4NdrGB1TU4-vrMAvUZhf0C26bdNs8vKIB4ROKhD33GHC8LIU7\
        ej8eO40Tt2-Ugl2E5FlzTrVt_XYKEQ9Lt-YbuOui3pnhtGKAzEb3xZQtxhrzogiihNwDGl1xn3iTzS-8TPCnIp_stcRNdcFf\
        rRLv7_j4abDas0KIyaQas5-KoID2bGCwMAuM5yEcYqvZN_IbptXPANKO09mMw-Vvd2lh-qUBkw-DlINK4K2D8ja9AJDeHHDn\
        nAnapbp_-10nk2o_FxToOKuwyv8sSejOLRS1yDFNyIs3qDgaL1ksCw";
    const RSA_TOKEN: &str = "\
        eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSJ9.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUuY29tLyIsImF1ZCI6Im1\
        lcmlkaWFuIiwidGVuYW50IjoidG9rZW5zIiwiZXhwIjo0MTAyNDQ0ODAwfQ.Da1AZ-95-BLnyu8voYQR1RhFP92NtB-xzuw9\
        F6_eGGYj4ls_UM-3qOK0u_HrT3mTTuHvgv_umh4elu0bFZpsZQOj2GrJsXIOMZp6Yj9KwZcNp2bpgPOzo2fLgBrcPbiHJCHG\
        vGI0sP8CPML-PG5lh1dysy0a9jZ2a-iLnNjVx97XnrNWjCJ418ofvUS71Yh5bbDjNduiq3qnjgCRPQxRpbcKH2N9IUre85Ld\
        2B-W-_Xg50H8m_fpv1DaLGHIZgrat9vkeCY2rZEwNVWYOFjA4FMCUK1-xF-OaMvIkFyHIjCDQdG0QQW1jbX1EOTb7T5eWDo5\
        h0qa17G6UoKTZXRaxg";

    fn public(kid: &str, key: PublicKey) -> NamedKey {
        NamedKey { kid: Some(kid.to_owned()), key }
    }

    #[test]
    fn a_token_signed_by_another_library_is_verified() {
        let modulus = URL_SAFE_NO_PAD.decode(RSA_MODULUS).unwrap();
        let keys = [public("rsa", PublicKey::Rsa { n: modulus, e: vec![1, 0, 1] })];
        let check = |text: &str| {
            let token = Token::parse(text.as_bytes(), Algorithm::PUBLIC)?;
            token.verified(|input| verify(&keys, input)).map(drop)
        };
        assert_eq!(check(RSA_TOKEN), Ok(()));
        let (signed, signature) = RSA_TOKEN.rsplit_once('.').unwrap();
        let (header, _) = signed.split_once('.').unwrap();
        assert_eq!(check(&format!("{header}.e30.{signature}")), Err(TokenProblem::Signature));
    }

    #[test]
    fn a_token_that_matches_two_keys_is_rejected() {
        let keys =
            [public("1", PublicKey::Ed25519(vec![1; 32])), public("2", PublicKey::Ed25519(vec![2; 32]))];
        let token =
            SignatureInput { algorithm: Algorithm::EdDsa, kid: None, signed: b"x", signature: &[0; 64] };
        assert_eq!(verify(&keys, &token), Err(TokenProblem::Key));
        assert_eq!(verify(&keys, &SignatureInput { kid: Some("2"), ..token }), Err(TokenProblem::Signature));
    }
}

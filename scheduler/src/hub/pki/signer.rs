//! Signatures of the authority: with a key in a file, or by an external command that has access to the key.
//!
//! An external signer (a command for a hardware module or a key service of a cloud) receives the bytes to be signed on
//! stdin and the fingerprint of the authority in `MERIDIAN_AUTHORITY`, and writes the signature to stdout: DER for ECDSA,
//! raw for Ed25519 and RSA (PKCS #1, SHA-256). Each signature is verified before the certificate is sent.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType, SerialNumber, SignatureAlgorithm, SigningKey,
    SubjectPublicKeyInfo,
};
use regions::spiffe::SpiffeId;
use scheduler_core::pki::issue::{AUTHORITY_VALIDITY, ValidityPeriod};
use scheduler_core::pki::subject::check_domain;
use scheduler_core::pki::token::Fingerprint;
use scheduler_core::pki::trust::{CertificateSerial, TrustedAuthority};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Maximum time of an external signer.
const SIGNER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a signature: one of RSA with 4096 bits has 512.
const SIGNATURE_BYTES_MAX: u64 = 1024;
/// Variable with the fingerprint of the authority, for an external signer.
const AUTHORITY_VARIABLE: &str = "MERIDIAN_AUTHORITY";
/// Ending of the files with the certificates of authorities.
const CERTIFICATE_ENDING: &str = "crt";
/// Ending of the files with their keys.
const KEY_ENDING: &str = "key";

/// Signature of the authority's key over the bytes of a certificate.
pub(crate) trait AuthoritySigner: Send + Sync + 'static {
    /// Signs with the key of this authority. It may block.
    fn sign(
        &self,
        authority: &Fingerprint,
        key: &SubjectPublicKeyInfo,
        bytes: &[u8],
    ) -> Result<Vec<u8>, SignerError>;
}

/// Failed signature.
#[derive(Debug, thiserror::Error)]
pub enum SignerError {
    /// The file with the key of the authority is missing, unreadable, or readable by others.
    #[error("the key of the authority, {}, {problem}; copy it from the hub that created it, with mode 0600", file.display())]
    KeyFile {
        /// Key file.
        file: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The command that signs for the authority failed. No certificate is issued until it succeeds.
    #[error("the external signer {0}; see its own log")]
    Command(String),
    /// The certificate of the authority cannot be used; the text has the file and the cause.
    #[error("the certificate of the authority {0}")]
    Authority(String),
    /// The TLS library rejects the certificate that was to be issued, or the signature of the signer is wrong.
    #[error("the certificate cannot be signed: {0}")]
    Certificate(String),
}

/// Signer with the keys of the authorities in a folder.
#[derive(Debug)]
pub(crate) struct FileSigner {
    folder: PathBuf,
}

impl FileSigner {
    /// Creates the signer of a folder.
    pub(crate) fn new(folder: PathBuf) -> FileSigner {
        FileSigner { folder }
    }
}

impl AuthoritySigner for FileSigner {
    fn sign(
        &self,
        authority: &Fingerprint,
        _: &SubjectPublicKeyInfo,
        bytes: &[u8],
    ) -> Result<Vec<u8>, SignerError> {
        let file = path(&self.folder, authority, KEY_ENDING);
        let problem = |problem: String| SignerError::KeyFile { file: file.clone(), problem };
        let text =
            std::fs::read_to_string(&file).map_err(|error| problem(format!("cannot be read: {error}")))?;
        let key = KeyPair::from_pem(&text).map_err(|_| problem("has no usable private key".to_owned()))?;
        key.sign(bytes).map_err(|error| problem(format!("cannot sign: {error}")))
    }
}

/// Signer that executes a command.
#[derive(Debug)]
pub(crate) struct CommandSigner {
    command: Vec<String>,
    runtime: tokio::runtime::Handle,
}

impl CommandSigner {
    /// Creates the signer of a command with its arguments.
    pub(crate) fn new(command: Vec<String>, runtime: tokio::runtime::Handle) -> CommandSigner {
        CommandSigner { command, runtime }
    }

    async fn run(&self, authority: &Fingerprint, bytes: &[u8]) -> Result<Vec<u8>, SignerError> {
        let failed = |error: std::io::Error| SignerError::Command(format!("cannot be executed: {error}"));
        let (program, arguments) =
            self.command.split_first().ok_or_else(|| SignerError::Command("is not configured".to_owned()))?;
        let mut child = Command::new(program)
            .args(arguments)
            .env(AUTHORITY_VARIABLE, authority.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let mut signature = Vec::new();
        if let Some(mut input) = input {
            // A signer that does not read its input fails below, by its signature.
            input.write_all(bytes).await.ok();
        }
        if let Some(output) = output {
            output.take(SIGNATURE_BYTES_MAX + 1).read_to_end(&mut signature).await.map_err(failed)?;
        }
        if signature.len() as u64 > SIGNATURE_BYTES_MAX {
            return Err(SignerError::Command(format!("wrote more than {SIGNATURE_BYTES_MAX} bytes")));
        }
        let status = child.wait().await.map_err(failed)?;
        if status.success() {
            Ok(signature)
        } else {
            Err(SignerError::Command(format!("ended with {status}")))
        }
    }
}

impl AuthoritySigner for CommandSigner {
    fn sign(
        &self,
        authority: &Fingerprint,
        _: &SubjectPublicKeyInfo,
        bytes: &[u8],
    ) -> Result<Vec<u8>, SignerError> {
        self.runtime.block_on(async {
            let run = timeout(SIGNER_TIMEOUT, self.run(authority, bytes)).await;
            run.map_err(|_| SignerError::Command(format!("did not end within {SIGNER_TIMEOUT:?}")))?
        })
    }
}

/// Key of an authority as the library for certificates uses it. It keeps the error of the signer, since the library has
/// no place for it.
struct SigningAdapter<'a> {
    signer: &'a dyn AuthoritySigner,
    authority: Fingerprint,
    key: SubjectPublicKeyInfo,
    failure: std::cell::RefCell<Option<SignerError>>,
}

impl PublicKeyData for SigningAdapter<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.key.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.key.algorithm()
    }
}

impl SigningKey for SigningAdapter<'_> {
    fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.signer.sign(&self.authority, &self.key, bytes).map_err(|error| {
            self.failure.replace(Some(error));
            rcgen::Error::RemoteKeyError
        })
    }
}

/// Certificate to be signed.
#[derive(Debug)]
pub(crate) struct CertificateOrder<'a> {
    /// Name of the owner.
    pub(crate) subject: &'a SpiffeId,
    /// Serial number.
    pub(crate) serial: &'a CertificateSerial,
    /// Validity.
    pub(crate) period: ValidityPeriod,
    /// Public key of the owner.
    pub(crate) key: &'a SubjectPublicKeyInfo,
}

/// Signs a certificate; returns it in PEM, followed by that of the authority. It may block.
pub(crate) fn sign(
    signer: &dyn AuthoritySigner,
    authority: &TrustedAuthority,
    order: &CertificateOrder<'_>,
) -> Result<String, SignerError> {
    let unusable = |problem: &str| SignerError::Authority(problem.to_owned());
    let der = der_of(&authority.certificate)?;
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| unusable("is malformed"))?;
    let key = SubjectPublicKeyInfo::from_der(parsed.public_key().raw).map_err(|_| {
        unusable("has a key of an unsupported kind; use ECDSA P-256 or P-384, Ed25519, or RSA")
    })?;
    let adapter = SigningAdapter {
        signer,
        authority: authority.fingerprint,
        key,
        failure: std::cell::RefCell::default(),
    };
    let issuer = Issuer::from_ca_cert_der(&der.as_slice().into(), &adapter)
        .map_err(|error| SignerError::Authority(format!("is unusable: {error}")))?;
    let mut params = CertificateParams::default();
    let rejected = |error: rcgen::Error| SignerError::Certificate(error.to_string());
    params.distinguished_name.push(DnType::CommonName, common_name(order.subject));
    params.subject_alt_names = vec![SanType::URI(order.subject.to_string().try_into().map_err(rejected)?)];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    params.serial_number = Some(SerialNumber::from(serial_bytes(order.serial)));
    params.not_before = (std::time::UNIX_EPOCH + order.period.not_before).into();
    params.not_after = (std::time::UNIX_EPOCH + order.period.not_after).into();
    let signed = params.signed_by(order.key, &issuer);
    if let Some(failure) = adapter.failure.take() {
        return Err(failure);
    }
    let signed = signed.map_err(rejected)?;
    let invalid = || SignerError::Certificate("the signature is not one of the authority's key".to_owned());
    let (_, certificate) = X509Certificate::from_der(signed.der()).map_err(|_| invalid())?;
    certificate.verify_signature(Some(parsed.public_key())).map_err(|_| invalid())?;
    Ok(format!("{}{}", signed.pem(), authority.certificate))
}

/// Returns a name for tools that show one, of at most 64 characters (RFC 5280, A.1).
fn common_name(subject: &SpiffeId) -> String {
    let id = subject.to_string();
    let path = id.strip_prefix("spiffe://").and_then(|id| id.split_once('/')).map_or("", |(_, path)| path);
    path.chars().take(64).collect()
}

fn serial_bytes(serial: &CertificateSerial) -> Vec<u8> {
    let digits = serial.as_str().as_bytes().chunks(2);
    digits.filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

fn der_of(pem: &str) -> Result<Vec<u8>, SignerError> {
    let parsed = x509_parser::pem::parse_x509_pem(pem.as_bytes());
    match parsed {
        Ok((_, pem)) if pem.label == "CERTIFICATE" => Ok(pem.contents),
        Ok(_) | Err(_) => Err(SignerError::Authority("is not PEM; it needs `BEGIN CERTIFICATE`".to_owned())),
    }
}

/// Reads the certificate of an authority; returns it with its trust domain.
pub(crate) fn read_authority(pem: &str) -> Result<(TrustedAuthority, String), SignerError> {
    let unusable = |problem: String| SignerError::Authority(problem);
    let der = der_of(pem)?;
    let (rest, parsed) = X509Certificate::from_der(&der).map_err(|_| unusable("is malformed".to_owned()))?;
    if !rest.is_empty() || !parsed.is_ca() {
        return Err(unusable("is not one of an authority (basic constraints CA:TRUE)".to_owned()));
    }
    if parsed.key_usage().is_ok_and(|usage| usage.is_some_and(|usage| !usage.value.key_cert_sign())) {
        return Err(unusable("may not sign certificates (key usage keyCertSign)".to_owned()));
    }
    let names = parsed.subject_alternative_name().ok().flatten();
    let mut uris = names.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
        x509_parser::extensions::GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let domain = match (uris.next().and_then(|uri| uri.strip_prefix("spiffe://")), uris.next()) {
        (Some(domain), None) if check_domain(domain).is_ok() => domain.to_owned(),
        _ => return Err(unusable("needs one URI among its names, spiffe://TRUST-DOMAIN".to_owned())),
    };
    let not_after = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
    let certificate = pem_of(&der);
    let not_after = Duration::from_secs(not_after);
    Ok((TrustedAuthority { fingerprint: Fingerprint::of(&der), certificate, not_after }, domain))
}

/// Returns the serial number of a certificate.
pub(super) fn serial_of(pem: &str) -> Result<CertificateSerial, SignerError> {
    let der = der_of(pem)?;
    let malformed = || SignerError::Authority("is malformed".to_owned());
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| malformed())?;
    scheduler_core::pki::hex(parsed.raw_serial()).parse().map_err(|_| malformed())
}

fn pem_of(der: &[u8]) -> String {
    pem::encode(&pem::Pem::new("CERTIFICATE", der))
}

/// Creates an authority with a new key, and writes both to a folder. It blocks.
///
/// # Errors
///
/// When the folder cannot be written.
pub fn create_authority(folder: &Path, domain: &str, now: Duration) -> Result<TrustedAuthority, String> {
    check_domain(domain).map_err(|error| error.to_string())?;
    let failed = |error: rcgen::Error| format!("cannot create an authority: {error}");
    let key = KeyPair::generate().map_err(failed)?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Meridian");
    params.distinguished_name.push(DnType::OrganizationName, domain);
    params.subject_alt_names = vec![SanType::URI(format!("spiffe://{domain}").try_into().map_err(failed)?)];
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let period = ValidityPeriod::starting(now, AUTHORITY_VALIDITY, now + AUTHORITY_VALIDITY)
        .map_err(|error| error.to_string())?;
    params.not_before = (std::time::UNIX_EPOCH + period.not_before).into();
    params.not_after = (std::time::UNIX_EPOCH + period.not_after).into();
    let certificate = params.self_signed(&key).map_err(failed)?;
    let authority = TrustedAuthority {
        fingerprint: Fingerprint::of(certificate.der()),
        certificate: certificate.pem(),
        not_after: period.not_after,
    };
    scheduler_client::identity_folder::create_private(folder).map_err(|error| error.to_string())?;
    let write = |ending: &str, text: &str| {
        let file = path(folder, &authority.fingerprint, ending);
        scheduler_client::identity_folder::write_private(&file, text.as_bytes())
            .map_err(|error| format!("{} cannot be written: {error}", file.display()))
    };
    write(KEY_ENDING, &key.serialize_pem())?;
    write(CERTIFICATE_ENDING, &authority.certificate)?;
    Ok(authority)
}

/// Reads the only authority of a folder, with its trust domain.
pub(crate) fn only_authority(folder: &Path) -> Result<(TrustedAuthority, String), String> {
    let unreadable = |error: std::io::Error| format!("{} cannot be read: {error}", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.path();
        if file.extension().is_some_and(|ending| ending == CERTIFICATE_ENDING) {
            found.push(file);
        }
    }
    match found.as_slice() {
        [file] => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
            read_authority(&text).map_err(|error| format!("{}: {error}", file.display()))
        }
        [] => Err(format!("{} has no authority; create one with `meridian pki init`", folder.display())),
        _ => Err(format!(
            "{} has several authorities, and the store does not say which one signs; leave the one that signs",
            folder.display()
        )),
    }
}

fn path(folder: &Path, authority: &Fingerprint, ending: &str) -> PathBuf {
    let name: String = authority.to_string().chars().take(16).collect();
    folder.join(format!("authority-{name}.{ending}"))
}

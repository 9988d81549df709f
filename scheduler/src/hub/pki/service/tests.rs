//! Operations of one or two hubs on a store in memory.

use super::super::init::{self, NewAuthority};
use super::super::signer::{CommandSigner, FileSigner};
use super::super::{closed_tokens, restore_closed_tokens};
use super::*;
use rcgen::{CertificateParams, KeyPair, SanType};
use scheduler_client::authority::KeyRequest;
use scheduler_store::SimStore;
use tempfile::TempDir;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

const NOW: Duration = Duration::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3600);

struct Fixture {
    store: SimStore,
    hubs: [IssuingAuthority<SimStore>; 2],
    _dir: TempDir,
}

impl Fixture {
    async fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let (catalogue, root) = (Arc::new(Catalogue::builtin()), dir.path().join("pki"));
        let request = NewAuthority {
            dir: &root,
            domain: "m.example",
            region: &"aws/us-east-1".parse().unwrap(),
            operator: "admin",
            operator_validity: issue::VALIDITY,
            addresses: vec!["127.0.0.1:7001".to_owned()],
            catalogue: &catalogue,
        };
        let folders = init::create(&request, NOW).unwrap();
        let store = SimStore::new();
        let hubs = [(), ()].map(|()| {
            let signer = Arc::new(FileSigner::new(folders.authority.clone()));
            let folder = Some(folders.authority.clone());
            IssuingAuthority::new(store.clone(), signer, catalogue.clone(), issue::VALIDITY, folder)
        });
        let (first, records) = init::read_first(&folders.authority, NOW).unwrap();
        hubs[0].begin(first, records).await.unwrap();
        Fixture { store, hubs, _dir: dir }
    }

    async fn token(&self, ttl: Duration) -> String {
        let request = NewTokenV1 {
            version: VERSION,
            role: "spoke".to_owned(),
            region: Some("aws/eu-central-1".to_owned()),
            name: None,
            ttl_s: ttl.as_secs(),
            validity_s: None,
        };
        self.hubs[0].create_token(request, NOW).await.unwrap().secret
    }

    async fn join(&self, secret: &str, csr: &str, now: Duration) -> Result<IssuedV1, PkiError> {
        self.hubs[0].join(secret, csr, address(1), now).await
    }
}

fn address(number: u8) -> IpAddr {
    [10, 0, 0, number].into()
}

fn csr() -> String {
    KeyRequest::generate().unwrap().csr
}

fn names(issued: &IssuedV1) -> Vec<String> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(issued.certificate.as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&pem.contents).unwrap();
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => (*uri).to_owned(),
        other => format!("{other:?}"),
    };
    names.value.general_names.iter().map(text).collect()
}

fn serial(issued: &IssuedV1) -> CertificateSerial {
    issued.serial.parse().unwrap()
}

fn spoke() -> SpiffeId {
    "spiffe://m.example/spoke/aws/eu-central-1/in/de".parse().unwrap()
}

#[tokio::test]
async fn a_certificate_has_the_name_of_the_token_whatever_the_request_says() {
    let fixture = Fixture::new().await;
    let secret = fixture.token(HOUR).await;
    let mut params = CertificateParams::new(vec!["evil.example".to_owned()]).unwrap();
    let operator = "spiffe://m.example/operator/admin".try_into().unwrap();
    params.subject_alt_names.push(SanType::URI(operator));
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let csr = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
    let issued = fixture.join(&secret, &csr, NOW).await.unwrap();
    assert_eq!(names(&issued), [spoke().to_string()]);
    let (_, pem) = x509_parser::pem::parse_x509_pem(issued.certificate.as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&pem.contents).unwrap();
    assert!(!certificate.is_ca());
    assert_eq!(issued.not_before_s, NOW.as_secs() - 300);
    assert_eq!(issued.not_after_s, NOW.as_secs() + 7 * 24 * 3600);
    let renewed = fixture.hubs[1].renew(&spoke(), &serial(&issued), &csr, NOW).await.unwrap();
    assert_eq!(names(&renewed), [spoke().to_string()]);
}

#[tokio::test]
async fn two_hubs_never_accept_a_token_twice() {
    for _ in 0..20 {
        let fixture = Fixture::new().await;
        let secret = fixture.token(HOUR).await;
        let (csr_1, csr_2) = (csr(), csr());
        let (one, other) = tokio::join!(
            fixture.hubs[0].join(&secret, &csr_1, address(1), NOW),
            fixture.hubs[1].join(&secret, &csr_2, address(2), NOW)
        );
        let rejected = [&one, &other]
            .into_iter()
            .filter(|it| matches!(it, Err(PkiError::Token(TokenRejected::Used(_)))))
            .count();
        assert_eq!((one.is_ok() ^ other.is_ok(), rejected), (true, 1), "{one:?} {other:?}");
        let certificates = fixture.hubs[0].certificates().await.unwrap();
        assert_eq!(certificates.iter().filter(|record| record.subject == spoke()).count(), 1);
    }
}

#[tokio::test]
async fn a_repeated_request_gets_the_same_certificate_and_another_key_gets_none() {
    let fixture = Fixture::new().await;
    let (secret, csr_1) = (fixture.token(HOUR).await, csr());
    let first = fixture.join(&secret, &csr_1, NOW).await.unwrap();
    let again = fixture.hubs[1].join(&secret, &csr_1, address(1), NOW).await.unwrap();
    assert_eq!(first.certificate, again.certificate, "the response was lost");
    let stolen = fixture.join(&secret, &csr(), NOW).await.unwrap_err();
    assert_eq!(stolen.join_rejection(), Some(JoinRejection::Used));
    let stolen = stolen.to_string();
    assert!(stolen.contains("used before") && stolen.contains("spoke/aws/eu-central-1"), "{stolen}");
    assert!(!stolen.contains(&secret));
    let unknown = fixture.join(&"0".repeat(40), &csr(), NOW).await.unwrap_err();
    assert!(matches!(unknown, PkiError::Token(TokenRejected::Unknown)), "{unknown}");
    assert_eq!(unknown.join_rejection(), Some(JoinRejection::Unknown));
    let typo = fixture.join("secret", &csr(), NOW).await.unwrap_err();
    assert!(matches!(typo, PkiError::Token(TokenRejected::Unknown)), "{typo}");
}

#[tokio::test]
async fn a_used_token_stays_used_when_the_store_is_restored_from_an_older_backup() {
    let fixture = Fixture::new().await;
    let folder = fixture._dir.path().join("hub");
    let secret = fixture.token(HOUR).await;
    let key = keys::join_token(&secret.parse::<JoinSecret>().unwrap().hash());
    let backup = fixture.store.get(&key).await.unwrap().unwrap().value.to_vec();
    let closed = fixture.hubs[0].closed.clone();
    let following =
        tokio::spawn(closed_tokens::follow(fixture.store.clone(), closed, folder.clone(), || NOW));
    fixture.join(&secret, &csr(), NOW).await.unwrap();
    let begun = Instant::now();
    while !closed_tokens::read(&folder).tokens.iter().any(|(hash, _)| key.ends_with(hash)) {
        assert!(begun.elapsed() < Duration::from_secs(10), "the used token is on disk");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    following.abort();
    fixture.store.put(&key, backup, None).await.unwrap();
    let reused = fixture.join(&secret, &csr(), NOW).await.unwrap_err();
    assert!(matches!(reused, PkiError::Token(TokenRejected::Used(_))), "{reused}");

    // The other hub starts with the folder, and one whose folder is restored too accepts no token of the backup.
    restore_closed_tokens(&fixture.hubs[1], &folder).await.unwrap();
    let reused = fixture.hubs[1].join(&secret, &csr(), address(2), NOW).await.unwrap_err();
    assert!(matches!(reused, PkiError::Token(TokenRejected::Used(_))), "{reused}");
    closed_tokens::distrust(&folder).unwrap();
    restore_closed_tokens(&fixture.hubs[1], &folder).await.unwrap();
    let reused = fixture.hubs[1].join(&secret, &csr(), address(2), NOW).await.unwrap_err();
    assert!(matches!(reused, PkiError::Token(TokenRejected::Unknown)), "{reused}");
    assert!(!closed_tokens::read(&folder).is_incomplete, "tokens that are created now are valid");
    let next = fixture.token(HOUR).await;
    restore_closed_tokens(&fixture.hubs[1], &folder).await.unwrap();
    fixture.join(&next, &csr(), NOW).await.unwrap();
}

#[tokio::test]
async fn an_expired_token_and_a_weak_or_broken_request_issue_nothing() {
    let fixture = Fixture::new().await;
    let secret = fixture.token(HOUR).await;
    let late = fixture.join(&secret, &csr(), NOW + HOUR + Duration::from_secs(1)).await.unwrap_err();
    assert!(matches!(late, PkiError::Token(TokenRejected::Expired)), "{late}");
    assert_eq!(late.join_rejection(), Some(JoinRejection::Expired));
    let weak = fixture.join(&secret, include_str!("../testdata/rsa-1024.pem"), NOW).await.unwrap_err();
    assert!(weak.to_string().contains("weak RSA key"), "{weak}");
    let garbage = fixture.join(&secret, "garbage", NOW).await.unwrap_err();
    assert!(garbage.to_string().contains("no request for a certificate"), "{garbage}");
    assert_eq!(garbage.join_rejection(), Some(JoinRejection::InvalidRequest));
    assert!(fixture.join(&secret, &csr(), NOW).await.is_ok(), "a rejected request does not use up the token");
}

#[tokio::test]
async fn the_store_and_the_listing_have_no_secret() {
    let fixture = Fixture::new().await;
    let secret = fixture.token(HOUR).await;
    let listed = serde_json::to_string(&fixture.hubs[0].list(NOW).await.unwrap()).unwrap();
    assert!(listed.contains("spoke/aws/eu-central-1") && !listed.contains(&secret));
    for entry in fixture.store.range("").await.unwrap().entries {
        let value = String::from_utf8_lossy(&entry.value).into_owned();
        assert!(!entry.key.contains(&secret) && !value.contains(&secret), "{}", entry.key);
    }
}

#[tokio::test]
async fn failed_attempts_of_an_address_are_limited_and_others_can_join() {
    let fixture = Fixture::new().await;
    let secret = fixture.token(HOUR).await;
    for _ in 0..scheduler_core::pki::limit::FAILURES_MAX {
        fixture.join(&"0".repeat(40), &csr(), NOW).await.unwrap_err();
    }
    let limited = fixture.join(&secret, &csr(), NOW).await.unwrap_err();
    assert!(matches!(limited, PkiError::TooManyAttempts(_)), "{limited}");
    assert!(fixture.hubs[0].join(&secret, &csr(), address(2), NOW).await.is_ok());
}

#[tokio::test]
async fn a_revoked_certificate_is_not_renewed_and_neither_is_its_successor_left_out() {
    let fixture = Fixture::new().await;
    let first = fixture.join(&fixture.token(HOUR).await, &csr(), NOW).await.unwrap();
    let second = fixture.hubs[1].renew(&spoke(), &serial(&first), &csr(), NOW).await.unwrap();
    let unused = fixture.token(HOUR).await;
    let own = fixture.hubs[0].certificates().await.unwrap();
    let admin = own.iter().find(|record| record.subject.to_string().ends_with("operator/admin")).unwrap();
    let request = |target: &str, own: bool| RevokeV1 { version: VERSION, target: target.to_owned(), own };
    let revoke = async |target: &str, own: bool| {
        fixture.hubs[0].revoke(&request(target, own), Some(&admin.serial), NOW).await
    };
    let before = fixture.hubs[0].trust().await.unwrap().state.generation;
    let revoked = revoke("spoke/aws/eu-central-1", false).await.unwrap();
    assert_eq!((revoked.revoked.len(), revoked.tokens), (2, 1));
    let state = fixture.hubs[1].trust().await.unwrap().state;
    assert!(state.generation > before);
    for issued in [&first, &second] {
        assert!(state.revoked.contains_key(&serial(issued)));
        let error = fixture.hubs[1].renew(&spoke(), &serial(issued), &csr(), NOW).await.unwrap_err();
        assert!(matches!(error, PkiError::Revoked), "{error}");
    }
    let error = fixture.join(&unused, &csr(), NOW).await.unwrap_err();
    assert!(matches!(error, PkiError::Token(TokenRejected::Unknown)), "{error}");
    let error = revoke("spoke/aws/eu-central-1", false).await.unwrap_err();
    assert!(matches!(error, PkiError::NotFound(_)), "{error}");
    // Revoking oneself is a mistake, unless it is meant.
    let error = revoke("admin", false).await.unwrap_err().to_string();
    assert!(error.contains("--own"), "{error}");
    assert_eq!(revoke("admin", true).await.unwrap().revoked.len(), 1);
}

#[tokio::test]
async fn a_renewal_that_races_with_a_revocation_leaves_no_valid_certificate() {
    for _ in 0..20 {
        let fixture = Fixture::new().await;
        let first = fixture.join(&fixture.token(HOUR).await, &csr(), NOW).await.unwrap();
        let request = RevokeV1 { version: VERSION, target: spoke().to_string(), own: false };
        let (owner, other, csr, first) = (spoke(), "01ff".parse().unwrap(), csr(), serial(&first));
        let (renewed, revoked) = tokio::join!(
            fixture.hubs[0].renew(&owner, &first, &csr, NOW),
            fixture.hubs[1].revoke(&request, Some(&other), NOW)
        );
        revoked.unwrap();
        let state = fixture.hubs[0].trust().await.unwrap().state;
        if let Ok(renewed) = renewed {
            assert!(state.revoked.contains_key(&serial(&renewed)));
        }
        assert!(state.revoked.contains_key(&first));
    }
}

#[tokio::test]
async fn a_replayed_renewal_is_limited() {
    let fixture = Fixture::new().await;
    let first = fixture.join(&fixture.token(HOUR).await, &csr(), NOW).await.unwrap();
    let csr = csr();
    for _ in 0..RENEWALS_MAX {
        fixture.hubs[0].renew(&spoke(), &serial(&first), &csr, NOW).await.unwrap();
    }
    let error = fixture.hubs[0].renew(&spoke(), &serial(&first), &csr, NOW).await.unwrap_err();
    assert!(matches!(error, PkiError::Limit(_)), "{error}");
}

#[tokio::test]
async fn a_certificate_that_the_restored_store_does_not_know_can_be_renewed() {
    let fixture = Fixture::new().await;
    let unknown: CertificateSerial = "0123".parse().unwrap();
    let renewed = fixture.hubs[0].renew(&spoke(), &unknown, &csr(), NOW).await.unwrap();
    assert_eq!(names(&renewed), [spoke().to_string()]);
}

#[tokio::test]
async fn a_rotation_waits_for_each_process_and_then_signs_with_the_new_authority() {
    let fixture = Fixture::new().await;
    let [hub, _] = &fixture.hubs;
    let first = fixture.join(&fixture.token(HOUR).await, &csr(), NOW).await.unwrap();
    let rotate = async |phase: &str, force: bool| {
        let (phase, certificate, cancel) = (phase.to_owned(), None, false);
        hub.rotate(RotateV1 { version: VERSION, phase, certificate, cancel, force }, NOW).await
    };
    let trusted = rotate("single", false).await.unwrap();
    assert_eq!((trusted.phase.as_str(), trusted.authorities.len(), trusted.signer), ("next_trusted", 2, 0));
    assert!(rotate("single", false).await.unwrap_err().to_string().contains("look again"));
    let waiting = rotate("next_trusted", false).await.unwrap_err().to_string();
    assert!(waiting.contains("spoke/aws/eu-central-1") && waiting.contains("hub/aws/us-east-1"), "{waiting}");
    let generation = hub.trust().await.unwrap().state.generation;
    for record in hub.certificates().await.unwrap() {
        // A process cannot acknowledge what does not exist yet.
        hub.applied(&record.serial, generation + 1).await.unwrap();
        assert!(rotate("next_trusted", false).await.is_err());
    }
    for record in hub.certificates().await.unwrap() {
        hub.applied(&record.serial, generation).await.unwrap();
    }
    let signs = rotate("next_trusted", false).await.unwrap();
    assert_eq!((signs.phase.as_str(), signs.signer), ("next_signs", 1));
    assert!(rotate("next_signs", false).await.unwrap_err().to_string().contains("spoke/aws/eu-central-1"));
    let renewed = hub.renew(&spoke(), &serial(&first), &csr(), NOW).await.unwrap();
    assert_eq!(renewed.authority, signs.authorities[1].fingerprint);
    assert!(renewed.certificate.contains(signs.authorities[1].certificate.trim()));
    let waiting = rotate("next_signs", false).await.unwrap_err().to_string();
    assert!(!waiting.contains("spoke") && waiting.contains("hub/aws/us-east-1"), "{waiting}");
    let single = rotate("next_signs", true).await.unwrap();
    assert_eq!((single.phase.as_str(), single.authorities.len()), ("single", 1));
    assert_eq!(single.authorities[0].fingerprint, renewed.authority);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_external_signer_signs_and_a_wrong_signature_is_rejected() {
    let fixture = Fixture::new().await;
    let state = fixture.hubs[0].trust().await.unwrap().state;
    let folder = fixture.hubs[0].folder.clone().unwrap();
    let key = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let key = key.into_iter().find(|path| path.extension().is_some_and(|it| it == "key")).unwrap();
    let handle = tokio::runtime::Handle::current();
    let sign = async |command: &str| {
        let command = ["sh", "-c", command].map(str::to_owned).to_vec();
        let requested = RequestedKey::parse(&csr()).unwrap();
        let (handle, authority) = (handle.clone(), state.signer().clone());
        tokio::task::spawn_blocking(move || {
            let period = ValidityPeriod::starting(NOW, HOUR, authority.not_after).unwrap();
            let (subject, serial) = (spoke(), "0102".parse().unwrap());
            let order = CertificateOrder { subject: &subject, serial: &serial, period, key: &requested.key };
            signer::sign(&CommandSigner::new(command, handle), &authority, &order)
        })
        .await
        .unwrap()
    };
    let openssl =
        format!("test ${{#MERIDIAN_AUTHORITY}} = 64 && openssl dgst -sha256 -sign {}", key.display());
    sign(&openssl).await.unwrap();
    for (command, problem) in [
        ("cat > /dev/null; echo wrong", "not one of the authority's key"),
        ("cat > /dev/null; exit 3", "ended with exit status: 3"),
        ("cat > /dev/null; head -c 5000 /dev/zero", "more than 1024 bytes"),
    ] {
        let error = sign(command).await.unwrap_err().to_string();
        assert!(error.contains(problem), "{command}: {error}");
    }
}

#[tokio::test]
async fn expired_records_are_deleted_and_others_stay() {
    let fixture = Fixture::new().await;
    fixture.join(&fixture.token(HOUR).await, &csr(), NOW).await.unwrap();
    let count = async |prefix: &str| fixture.store.range(prefix).await.unwrap().entries.len();
    fixture.hubs[0].delete_expired(NOW).await.unwrap();
    assert_eq!((count(keys::CERTIFICATES).await, count(keys::JOIN_TOKENS).await), (3, 1));
    fixture.hubs[0].delete_expired(NOW + 2 * HOUR).await.unwrap();
    assert_eq!((count(keys::CERTIFICATES).await, count(keys::JOIN_TOKENS).await), (3, 0));
    fixture.hubs[0].delete_expired(NOW + issue::VALIDITY + HOUR).await.unwrap();
    assert_eq!(count(keys::CERTIFICATES).await, 0);
}

#[tokio::test]
async fn invalid_orders_of_tokens_are_rejected_with_the_reason() {
    let fixture = Fixture::new().await;
    let order = |role: &str, region: Option<&str>, name: Option<&str>, ttl_s: u64| NewTokenV1 {
        version: VERSION,
        role: role.to_owned(),
        region: region.map(str::to_owned),
        name: name.map(str::to_owned),
        ttl_s,
        validity_s: None,
    };
    for (order, problem) in [
        (order("king", None, None, 3600), "not a role"),
        (order("spoke", None, None, 3600), "has a region"),
        (order("spoke", Some("aws/mars-1"), None, 3600), "not in the catalogue"),
        (order("operator", None, None, 3600), "has a name"),
        (order("operator", None, Some("a b"), 3600), "letters"),
        (order("operator", None, Some("bob"), 59), "ttl_s"),
        (order("operator", None, Some("bob"), 8 * 24 * 3600), "ttl_s"),
        (NewTokenV1 { validity_s: Some(1), ..order("operator", None, Some("bob"), 60) }, "validity"),
    ] {
        let error = fixture.hubs[0].create_token(order, NOW).await.unwrap_err().to_string();
        assert!(error.contains(problem), "{problem}: {error}");
    }
}

//! An etcd with mutual TLS, and a user with a password.

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use scheduler_store::{EtcdConfig, EtcdStore, EtcdTls, EtcdTlsError, EtcdUser, Store, StoreError, Watch};

use super::cluster::{Cluster, KEEP_ALIVE};
use super::{soon, wait_until};

/// Certificate authority.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate for this machine, and its key.
    fn sign(&self) -> (String, String) {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

#[test]
fn unusable_files_for_tls_are_named() {
    let authority = Authority::new();
    let ((ours, our_key), (_, other_key)) = (authority.sign(), authority.sign());
    let read = |ca: &str, certificate: &str, key: &str| {
        EtcdTls::new(ca.as_bytes(), Some((certificate.as_bytes(), key.as_bytes()))).map(drop)
    };
    assert_eq!(read(&authority.pem, &ours, &our_key), Ok(()));
    assert!(matches!(read("", &ours, &our_key), Err(EtcdTlsError::Authority(_))));
    assert!(matches!(read(&authority.pem, "", &our_key), Err(EtcdTlsError::Certificate(_))));
    for key in ["", &other_key] {
        assert!(matches!(read(&authority.pem, &ours, key), Err(EtcdTlsError::Key(_))));
    }
}

/// A server with TLS 1.2 only, such as an etcd that was built with Go 1.12, in the place of a member.
#[tokio::test]
async fn a_member_without_tls_1_3_is_not_used() {
    let authority = Authority::new();
    let (server, key) = authority.sign();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    let config = rustls::ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(server.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
        )
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
    let (refused, mut offered) = tokio::sync::mpsc::channel(1);
    let serving = tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            refused.send(acceptor.accept(tcp).await.map(drop)).await.ok();
        }
    });
    let tls = Some(EtcdTls::new(authority.pem.as_bytes(), None).unwrap());
    let config = EtcdConfig {
        endpoints: vec![endpoint],
        prefix: "t/".to_owned(),
        keep_alive: KEEP_ALIVE,
        user: None,
        tls,
    };
    let store = EtcdStore::new(config);
    tokio::select! {
        read = store.get("a") => panic!("no handshake: {read:?}"),
        handshake = offered.recv() => {
            let error = handshake.unwrap().unwrap_err().to_string();
            assert!(error.contains("Tls12NotOffered"), "{error}");
        }
    }
    serving.abort();
}

#[tokio::test]
async fn an_etcd_with_mutual_tls_and_a_password_requires_both() {
    let authority = Authority::new();
    let ((server, server_key), (ours, our_key)) = (authority.sign(), authority.sign());
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let extra_args = [
        "--client-cert-auth".to_owned(),
        format!("--trusted-ca-file={}", file("ca.crt", &authority.pem)),
        format!("--cert-file={}", file("server.crt", &server)),
        format!("--key-file={}", file("server.key", &server_key)),
    ];
    let cluster = Cluster::start_over_tls(extra_args.to_vec()).await;
    let store = |signed_by: &Authority, identity: bool, password: Option<&str>| {
        let identity = identity.then_some((ours.as_bytes(), our_key.as_bytes()));
        let tls = Some(EtcdTls::new(signed_by.pem.as_bytes(), identity).unwrap());
        let user =
            password.map(|password| EtcdUser { name: "root".to_owned(), password: password.to_owned() });
        let (endpoints, prefix) = (vec![cluster.endpoint(0)], "t/".to_owned());
        EtcdStore::new(EtcdConfig { endpoints, prefix, keep_alive: KEEP_ALIVE, user, tls })
    };
    let with_tls = store(&authority, true, None);
    wait_until("etcd takes writes over TLS", async || with_tls.put("a", b"1".to_vec(), None).await.is_ok())
        .await;
    let rejected = async |store: EtcdStore, reason: &str| {
        let rejected = store.get("a").await;
        assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "{reason}: {rejected:?}");
    };
    rejected(store(&authority, false, None), "without a client certificate").await;
    rejected(store(&Authority::new(), true, None), "with another authority").await;

    let tls = TlsOptions::new()
        .ca_certificate(Certificate::from_pem(&authority.pem))
        .identity(Identity::from_pem(&ours, &our_key));
    let options = ConnectOptions::new().with_tls(tls);
    let mut admin = Client::connect([cluster.endpoint(0)], Some(options)).await.unwrap();
    admin.user_add("root", "right", None).await.unwrap();
    admin.user_grant_role("root", "root").await.unwrap();
    admin.auth_enable().await.unwrap();
    rejected(with_tls, "without a user").await;
    rejected(store(&authority, true, Some("wrong")), "with a wrong password").await;
    let right = store(&authority, true, Some("right"));
    let at = right.put("a", b"2".to_vec(), None).await.unwrap();
    let changes = soon("a change", right.watch("", at).next()).await.unwrap();
    assert_eq!((changes.len(), changes[0].revision()), (1, at));
}

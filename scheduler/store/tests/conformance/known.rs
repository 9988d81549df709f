//! An etcd with mutual TLS, and a user with a password.

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use scheduler_store::{EtcdConfig, EtcdStore, EtcdTls, EtcdUser, Store, StoreError, Watch};

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
        let identity = identity.then(|| (ours.clone().into_bytes(), our_key.clone().into_bytes()));
        let tls = Some(EtcdTls { authority: signed_by.pem.clone().into_bytes(), identity });
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

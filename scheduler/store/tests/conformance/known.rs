//! An etcd that wants to know who speaks to it, and is known itself: TLS both ways, and a user with a password.

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use scheduler_store::{Etcd, EtcdConfig, EtcdTls, EtcdUser, Store, StoreError, Watch};

use super::cluster::{Cluster, KEEP_ALIVE};
use super::{soon, until};

/// Somebody who signs certificates.
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
async fn an_etcd_behind_tls_and_a_password_is_spoken_to_by_whoever_has_both() {
    let authority = Authority::new();
    let ((server, server_key), (ours, our_key)) = (authority.sign(), authority.sign());
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let further = [
        "--client-cert-auth".to_owned(),
        format!("--trusted-ca-file={}", file("ca.crt", &authority.pem)),
        format!("--cert-file={}", file("server.crt", &server)),
        format!("--key-file={}", file("server.key", &server_key)),
    ];
    let cluster = Cluster::start_over_tls(further.to_vec()).await;
    let store = |signed_by: &Authority, identity: bool, password: Option<&str>| {
        let identity = identity.then(|| (ours.clone().into_bytes(), our_key.clone().into_bytes()));
        let tls = Some(EtcdTls { authority: signed_by.pem.clone().into_bytes(), identity });
        let user =
            password.map(|password| EtcdUser { name: "root".to_owned(), password: password.to_owned() });
        let (endpoints, prefix) = (vec![cluster.endpoint(0)], "t/".to_owned());
        Etcd::new(EtcdConfig { endpoints, prefix, keep_alive: KEEP_ALIVE, user, tls })
    };
    let known = store(&authority, true, None);
    until("etcd takes writes over TLS", async || known.put("a", b"1".to_vec(), None).await.is_ok()).await;
    let refused = async |store: Etcd, why: &str| {
        let refused = store.get("a").await;
        assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{why}: {refused:?}");
    };
    refused(store(&authority, false, None), "without a certificate of our own").await;
    refused(store(&Authority::new(), true, None), "signed by somebody else").await;

    let tls = TlsOptions::new()
        .ca_certificate(Certificate::from_pem(&authority.pem))
        .identity(Identity::from_pem(&ours, &our_key));
    let options = ConnectOptions::new().with_tls(tls);
    let mut admin = Client::connect([cluster.endpoint(0)], Some(options)).await.unwrap();
    admin.user_add("root", "right", None).await.unwrap();
    admin.user_grant_role("root", "root").await.unwrap();
    admin.auth_enable().await.unwrap();
    refused(known, "without a user").await;
    refused(store(&authority, true, Some("wrong")), "with a wrong password").await;
    let right = store(&authority, true, Some("right"));
    let at = right.put("a", b"2".to_vec(), None).await.unwrap();
    let told = soon("a change", right.watch("", at).next()).await.unwrap();
    assert_eq!((told.len(), told[0].revision()), (1, at));
}

//! A server of the S3 protocol that stores objects in a folder and verifies signatures.

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use jobs::bucket::{BucketConfig, BucketCredentials};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use std::path::Path;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const KEY_ID: &str = "key";
const SECRET: &str = "secret";
pub(super) const BUCKET: &str = "jobs";

/// Server on a port of this machine; its connections end when it is dropped, its objects stay in the folder.
pub(super) struct S3Server {
    pub(super) port: u16,
    _task: JoinSet<()>,
}

impl S3Server {
    /// Starts a server of the buckets in a folder, on a free port or on this one.
    pub(super) async fn start(folder: &Path, port: u16) -> S3Server {
        std::fs::create_dir_all(folder.join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder).unwrap());
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let service = service.build();
        let listener = loop {
            // The connections of the server before may not have ended.
            match TcpListener::bind(("127.0.0.1", port)).await {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        };
        let port = listener.local_addr().unwrap().port();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service.clone());
                connections.spawn(async move { drop(served.await) });
            }
        });
        S3Server { port, _task: task }
    }

    pub(super) fn config(&self, prefix: &str) -> BucketConfig {
        config(self.port, prefix, SECRET)
    }
}

/// Returns the configuration of a bucket at this port.
pub(super) fn config(port: u16, prefix: &str, secret: &str) -> BucketConfig {
    BucketConfig {
        bucket: BUCKET.to_owned(),
        prefix: prefix.to_owned(),
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        region: "us-east-1".to_owned(),
        credentials: Some(BucketCredentials {
            key_id: KEY_ID.to_owned(),
            secret_key: secret.to_owned(),
            token: None,
        }),
        authorities: None,
    }
}

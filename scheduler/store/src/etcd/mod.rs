//! Store in a real etcd, of one or several members, for hubs on several machines.
//!
//! etcd is reliable; the connections to it are not. A member hangs and its connection stays open; one of three members
//! is down and some calls are sent to it; a leader fails and for a second no call succeeds; a watch ends, or is silent
//! for ever. So calls are retried in one place (here), members are selected in one (`members`), and watches are resumed
//! in one (`watch`).
//!
//! Any call is retried on other members until [`CALL_BUDGET`] is spent. That is safe for the calls of this store:
//! reads, transactions guarded by the revisions that they depend on, puts of whole values, leases, which expire if they
//! were granted twice. A guard may fail because the first attempt succeeded, so a caller whose guard fails reads the
//! key before it draws conclusions.
//!
//! All keys have a prefix, so that one etcd can serve several fleets and other applications.

mod convert;
mod members;
mod tls;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{
    Client, CompactionOptions, ConnectOptions, Error, GetOptions, GetResponse, KvClient,
    LeaseTimeToLiveOptions,
};
use tokio::time::timeout;

use crate::model::{KeyRange, KeyValue, Lease, Page, PageContent, Range, StoreError, Txn, TxnOutcome};
use crate::store::Store;
use convert::PrefixedKeys;
use members::{MemberTls, Members, pause};
pub use tls::{EtcdTls, EtcdTlsError};
pub use watch::EtcdWatch;

/// Time limit of a call to one member. An fsync on a busy disk takes a tenth of it.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// Time limit of a call with its retries. etcd elects a leader within 1.7 s of the last one's failure, and the first
/// attempt may have been lost on a member that hangs.
pub const CALL_BUDGET: Duration = Duration::from_secs(6);
/// Time limit of connecting.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// Interval of HTTP/2 keep-alive pings. etcd treats more than one in five seconds as an attack and closes the
/// connection, unless it is configured otherwise (`--grpc-keepalive-min-time`); so this is the shortest interval that
/// any etcd accepts, with a second for the difference of the two clocks.
pub const KEEP_ALIVE: Duration = Duration::from_secs(6);
/// Timeout of a keep-alive ping.
const KEEP_ALIVE_LIMIT: Duration = Duration::from_secs(2);
/// Maximum bytes of a response: all keys of a range, or all changes since a watch was interrupted. 64 regions with
/// eight spokes each and a thousand ready deployments per spoke are 20 MB.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// Connection settings of an etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// Client URLs of the members, each as `http://HOST:PORT` or `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// Prefix of all keys; not empty.
    pub prefix: String,
    /// Interval of keep-alive pings: [`KEEP_ALIVE`], unless the members are configured to accept more.
    pub keep_alive: Duration,
    /// User for authentication.
    pub user: Option<EtcdUser>,
    /// TLS settings, for `https` endpoints.
    pub tls: Option<EtcdTls>,
}

/// User of etcd.
#[derive(Clone)]
pub struct EtcdUser {
    /// The name.
    pub name: String,
    /// The password.
    pub password: String,
}

impl std::fmt::Debug for EtcdUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdUser").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Store in etcd. Clones are handles of the same store.
#[derive(Clone)]
pub struct EtcdStore {
    members: Arc<Members>,
    keys: PrefixedKeys,
}

impl EtcdStore {
    /// Creates a store in this etcd. Does not connect yet, so etcd may be unavailable.
    pub fn new(config: EtcdConfig) -> EtcdStore {
        let EtcdConfig { endpoints, prefix, keep_alive, user, tls } = config;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_LIMIT)
            .with_keep_alive(keep_alive, KEEP_ALIVE_LIMIT)
            .with_keep_alive_while_idle(true)
            // Otherwise a member without a quorum is silent on a watch without limit.
            .with_require_leader(true);
        if let Some(EtcdUser { name, password }) = user {
            options = options.with_user(name, password).with_auto_token_refresh(true);
        }
        let tls = tls.map(|tls| MemberTls { tls, keep_alive });
        EtcdStore {
            members: Arc::new(Members::new(endpoints, options, tls)),
            keys: PrefixedKeys::new(prefix),
        }
    }

    /// Compacts the history up to the present revision, as etcd does periodically if configured
    /// (`--auto-compaction-retention`).
    ///
    /// # Errors
    ///
    /// As for every call.
    pub async fn compact(&self) -> Result<(), StoreError> {
        let Range { revision, .. } = self.range("").await?;
        let outcome = self
            .call(|client| async move {
                let options = CompactionOptions::new().with_physical();
                kv(&client).compact(convert::signed(revision), Some(options)).await
            })
            .await;
        match outcome {
            Ok(_) => Ok(()),
            // Another client has compacted it first.
            Err(CallFailure::Rejected(error)) if convert::is_compacted(&error) => Ok(()),
            Err(failure) => Err(failure.into()),
        }
    }

    async fn read(&self, keys: KeyRange, options: GetOptions) -> Result<GetResponse, StoreError> {
        let from = &self.keys.outer(keys.from());
        let options = &match &keys {
            KeyRange::Prefix(_) => options.with_prefix(),
            KeyRange::Between { before, .. } => options.with_range(self.keys.outer(before)),
        };
        let read = |client: Client| async move { kv(&client).get(from.clone(), Some(options.clone())).await };
        Ok(self.call(read).await?)
    }

    /// Finds the missing lease of a transaction; etcd's error does not name it.
    async fn find_missing_lease(&self, txn: &Txn, original: Error) -> StoreError {
        for lease in convert::leases_of(txn) {
            let id = convert::signed(lease.0);
            let call = |client: Client| async move { client.lease_client().time_to_live(id, None).await };
            match self.call(call).await {
                Ok(response) if response.ttl() > 0 => {}
                Ok(_) => return StoreError::NoSuchLease(lease),
                Err(failure) => return failure.into(),
            }
        }
        StoreError::Unavailable(original.to_string())
    }

    /// Retries a call until it succeeds, is rejected, or its time limit is reached.
    async fn call<T, F>(&self, work: impl Fn(Client) -> F + Send + Sync) -> Result<T, CallFailure>
    where
        T: Send,
        F: Future<Output = Result<T, Error>> + Send,
    {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            let (member, outcome) = self.try_once(&work).await;
            let problem = match outcome {
                Ok(response) => return Ok(response),
                Err(CallFailure::Rejected(error)) => return Err(CallFailure::Rejected(error)),
                Err(CallFailure::NoResponse(problem)) => problem,
            };
            self.members.failed(member);
            tries += 1;
            if begun.elapsed() + pause(tries) > CALL_BUDGET {
                return Err(CallFailure::NoResponse(problem));
            }
            tokio::time::sleep(pause(tries)).await;
        }
    }

    /// Makes one attempt, on the current member.
    async fn try_once<T, F>(&self, work: &(impl Fn(Client) -> F + Sync)) -> (usize, Result<T, CallFailure>)
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let member = self.members.current();
        let result = timeout(CALL_LIMIT, async { work(self.members.client(member).await?).await }).await;
        let outcome = match result {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) if convert::is_final(&error) => Err(CallFailure::Rejected(error)),
            Ok(Err(error)) => Err(CallFailure::NoResponse(error.to_string())),
            Err(_) => Err(CallFailure::NoResponse(format!(
                "{} has not responded within {CALL_LIMIT:?}",
                self.members.endpoint(member)
            ))),
        };
        (member, outcome)
    }
}

/// Reason why a call failed.
enum CallFailure {
    /// etcd rejected the call.
    Rejected(Error),
    /// There is no response, so the outcome is unknown.
    NoResponse(String),
}

impl From<CallFailure> for StoreError {
    fn from(failure: CallFailure) -> StoreError {
        match failure {
            CallFailure::Rejected(error) => StoreError::Unavailable(error.to_string()),
            CallFailure::NoResponse(problem) => StoreError::Unavailable(problem),
        }
    }
}

impl CallFailure {
    /// Converts to the error of a call about this lease.
    fn about(self, lease: Lease) -> StoreError {
        match &self {
            CallFailure::Rejected(error) if convert::is_no_such_lease(error) => {
                StoreError::NoSuchLease(lease)
            }
            CallFailure::Rejected(_) | CallFailure::NoResponse(_) => self.into(),
        }
    }
}

fn kv(client: &Client) -> KvClient {
    client.kv_client().max_decoding_message_size(RESPONSE_BYTES_MAX)
}

impl Store for EtcdStore {
    type Watch = EtcdWatch;

    async fn get(&self, key: &str) -> Result<Option<KeyValue>, StoreError> {
        let key = &self.keys.outer(key);
        let mut response =
            self.call(|client| async move { kv(&client).get(key.clone(), None).await }).await?;
        Ok(response.take_kvs().pop().map(|entry| self.keys.entry(&entry)))
    }

    async fn range(&self, keys: impl Into<KeyRange> + Send) -> Result<Range, StoreError> {
        let mut response = self.read(keys.into(), GetOptions::new()).await?;
        let revision = convert::revision(response.header());
        let entries = response.take_kvs().iter().map(|entry| self.keys.entry(entry)).collect();
        Ok(Range { entries, revision })
    }

    async fn page(&self, keys: KeyRange, limit: usize, content: PageContent) -> Result<Page, StoreError> {
        // In etcd, 0 means no limit.
        let options = GetOptions::new().with_limit(i64::try_from(limit).unwrap_or(i64::MAX).max(1));
        let options = match content {
            PageContent::Values => options,
            PageContent::Keys => options.with_keys_only(),
        };
        let mut response = self.read(keys, options).await?;
        let total = usize::try_from(response.count()).unwrap_or_default();
        let entries = response.take_kvs();
        Ok(Page { entries: entries.iter().take(limit).map(|entry| self.keys.entry(entry)).collect(), total })
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        txn.validate()?;
        let theirs = &self.keys.txn(&txn);
        let response = match self.call(|client| async move { kv(&client).txn(theirs.clone()).await }).await {
            Ok(response) => response,
            Err(CallFailure::Rejected(error)) if convert::is_no_such_lease(&error) => {
                return Err(self.find_missing_lease(&txn, error).await);
            }
            Err(failure) => return Err(failure.into()),
        };
        Ok(TxnOutcome { succeeded: response.succeeded(), revision: convert::revision(response.header()) })
    }

    fn watch(&self, keys: impl Into<KeyRange>, from: u64) -> EtcdWatch {
        EtcdWatch::start(self.members.clone(), self.keys.clone(), keys.into(), from)
    }

    async fn lease_grant(&self, ttl: Duration, _: Instant) -> Result<Lease, StoreError> {
        let seconds = convert::whole_seconds(ttl);
        let grant = |client: Client| async move { client.lease_client().grant(seconds, None).await };
        let granted = self.call(grant).await?;
        Ok(Lease(convert::unsigned(granted.id())))
    }

    async fn lease_keep_alive(&self, lease: Lease, _: Instant) -> Result<Vec<String>, StoreError> {
        let id = convert::signed(lease.0);
        let keys = self
            .call(|client| async move {
                // One stream per keep-alive: a longer-lived keeper ends with its connection without an error.
                client.lease_client().keep_alive(id).await?;
                let options = LeaseTimeToLiveOptions::new().with_keys();
                client.lease_client().time_to_live(id, Some(options)).await
            })
            .await
            .map_err(|failure| failure.about(lease))?;
        // The lease ended between the two calls.
        if keys.ttl() <= 0 {
            return Err(StoreError::NoSuchLease(lease));
        }
        Ok(keys.keys().iter().map(|key| self.keys.inner(key)).collect())
    }

    async fn lease_revoke(&self, lease: Lease) -> Result<(), StoreError> {
        let id = convert::signed(lease.0);
        let revoke = |client: Client| async move { client.lease_client().revoke(id).await };
        self.call(revoke).await.map(drop).map_err(|failure| failure.about(lease))
    }

    async fn expire(&self, _: Instant) -> Result<Vec<Lease>, StoreError> {
        Ok(Vec::new())
    }
}

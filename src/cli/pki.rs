//! Command-line options of `meridian pki`, `meridian backup` and `meridian restore`.

use super::CallerOptions;
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum PkiCommand {
    /// Create a certificate authority, the identity of the first hub, and that of the first operator
    Init(InitOptions),
    /// Create a join token: one use, for one role and region
    Token(TokenOptions),
    /// Issue a certificate to an operator or viewer, into a new identity folder
    Issue(IssueOptions),
    /// List issued certificates and unused tokens
    List(MemberOptions),
    /// Revoke a certificate, or all certificates and unused tokens of an owner
    Revoke(RevokeOptions),
    /// Take the next step of replacing the authority, and explain what follows; without --yes, only explain
    Rotate(RotateOptions),
}

#[derive(Debug, Args)]
pub(crate) struct InitOptions {
    /// Directory to create: authority/, hub/ and operator/
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Name of the fleet in all certificates, such as m.example
    #[arg(long, value_name = "DOMAIN")]
    pub trust_domain: String,
    /// Region of the first hub, as cloud/region
    #[arg(long, value_name = "REGION")]
    pub region: String,
    /// Name of the first operator
    #[arg(long, value_name = "NAME", default_value = "admin")]
    pub operator: String,
    /// Address of the authority (`authority.listen` of the hub as others reach it); may be repeated
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7001")]
    pub authority: Vec<String>,
    /// Catalogue of clouds and regions; by default the built-in one
    #[arg(long, value_name = "FILE")]
    pub catalogue: Option<PathBuf>,
    /// Succeed without a change if the directory has all three already, as a step that runs before each start of a hub
    #[arg(long)]
    pub if_absent: bool,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

/// Options of commands that call the authority.
#[derive(Debug, Args)]
pub(crate) struct MemberOptions {
    /// Authentication at the authority
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Address of the authority, instead of those in the identity folder; may be repeated
    #[arg(long, value_name = "HOST:PORT")]
    pub authority: Vec<String>,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TokenOptions {
    /// Role: gateway, spoke, replica, hub, operator or viewer
    #[arg(long, value_name = "ROLE")]
    pub role: String,
    /// Region of a process, as cloud/region
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
    /// Name of an operator or viewer
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Time in which the token can be used
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    pub ttl: String,
    /// Validity of the certificate; by default that of the hub's configuration
    #[arg(long, value_name = "DURATION")]
    pub validity: Option<String>,
    /// Caller and authority
    #[command(flatten)]
    pub member: MemberOptions,
}

#[derive(Debug, Args)]
pub(crate) struct IssueOptions {
    /// Role: operator or viewer
    #[arg(long, value_name = "ROLE")]
    pub role: String,
    /// Name of the operator or viewer
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// Identity folder to create
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Validity of the certificate; `meridian pki` commands renew it at half of it
    #[arg(long, value_name = "DURATION", default_value = "30d")]
    pub validity: String,
    /// Caller and authority
    #[command(flatten)]
    pub member: MemberOptions,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeOptions {
    /// Serial number, SPIFFE ID or its path (spoke/aws/us-east-1), or the name of a person
    #[arg(value_name = "SERIAL|NAME")]
    pub target: String,
    /// Permit the revocation of the certificate with which this command runs
    #[arg(long)]
    pub own: bool,
    /// Caller and authority
    #[command(flatten)]
    pub member: MemberOptions,
}

#[derive(Debug, Args)]
pub(crate) struct RotateOptions {
    /// Take the step
    #[arg(long)]
    pub yes: bool,
    /// Return to the present authority, as long as the next one has not signed
    #[arg(long, conflicts_with_all = ["force", "certificate"])]
    pub cancel: bool,
    /// Take the step although the listed processes lose their connections
    #[arg(long)]
    pub force: bool,
    /// Certificate of the next authority, for the first step with an external signer; PEM
    #[arg(long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    /// Caller and authority
    #[command(flatten)]
    pub member: MemberOptions,
}

#[derive(Debug, Args)]
pub(crate) struct BackupOptions {
    /// File to write
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration of the hub
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Authentication of an operator, to back up a hub that runs; without it the hub must be stopped
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Address of the authority, for a token; may be repeated
    #[arg(long, value_name = "HOST:PORT")]
    pub authority: Vec<String>,
    /// Directory of receipts to include
    #[arg(long, value_name = "DIR")]
    pub receipts: Option<PathBuf>,
    /// File with the passphrase that encrypts the backup; by default the variable MERIDIAN_BACKUP_PASSPHRASE, if set
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreOptions {
    /// File that `meridian backup` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration of the hub, whose directories are created
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Directory for the receipts, if the backup has any
    #[arg(long, value_name = "DIR")]
    pub receipts: Option<PathBuf>,
    /// File with the passphrase; by default the variable MERIDIAN_BACKUP_PASSPHRASE, if set
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

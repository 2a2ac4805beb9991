"""How this host attaches what another host exports."""
